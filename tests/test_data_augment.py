"""Augmentation against Pillow, NumPy and torchvision."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torchvision.transforms import v2

from vision_rope.data import Mixing, decode_image, eval_transform, train_transform
from vision_rope.data.augment import RandomSymmetry, ThreeAugment


@pytest.fixture(scope="module")
def photo(shared_data: Path) -> Tensor:
    """160 rows, 256 columns."""
    return decode_image(shared_data / "odd_images" / "app13-multiple.jpg")


def as_pillow(image: Tensor) -> Image.Image:
    return Image.fromarray(image.permute(1, 2, 0).numpy())


def from_pillow(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


class TestEvaluation:
    @pytest.mark.parametrize(("size", "crop_pct"), [(64, 1.0), (96, 0.875), (224, 0.9), (31, 0.7)])
    def test_square_is_torchvisions_resize_and_crop(self, photo: Tensor, size: int, crop_pct: float) -> None:
        covered = int(size / crop_pct)
        for image in (photo, photo.transpose(1, 2)):
            expected = v2.Compose(
                [v2.Resize(covered, interpolation=v2.InterpolationMode.BICUBIC), v2.CenterCrop(size)]
            )(image)
            assert torch.equal(eval_transform((size, size), crop_pct=crop_pct)(image), expected)

    @pytest.mark.parametrize("size", [(64, 160), (160, 64), (33, 47), (320, 64)])
    @pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
    def test_rectangles_show_the_middle_as_pillow_does(
        self, photo: Tensor, size: tuple[int, int], interpolation: str
    ) -> None:
        result = eval_transform(size, interpolation=interpolation)(photo)
        filter = Image.Resampling.BICUBIC if interpolation == "bicubic" else Image.Resampling.BILINEAR
        (height, width), (rows, columns) = size, photo.shape[1:]
        if height / rows > width / columns:
            resized = as_pillow(photo).resize((int(columns * height / rows), height), filter)
        else:
            resized = as_pillow(photo).resize((width, int(rows * width / columns)), filter)
        top, left = round((resized.height - height) / 2), round((resized.width - width) / 2)
        expected = from_pillow(resized.crop((left, top, left + width, top + height)))
        assert result.shape == (3, *size)
        assert result.dtype == torch.uint8
        assert (result.int() - expected.int()).abs().max() <= 2

    def test_an_image_of_the_size_is_left_alone(self, photo: Tensor) -> None:
        assert torch.equal(eval_transform((160, 256))(photo), photo)

    def test_extreme_shapes(self) -> None:
        for shape in ((1, 1), (1, 500), (500, 1), (3, 4000)):
            image = torch.randint(256, (3, *shape), dtype=torch.uint8)
            assert eval_transform((32, 48), crop_pct=0.9)(image).shape == (3, 32, 48)


class TestTraining:
    @pytest.mark.parametrize("crop", ["random-resized", "simple", "resize"])
    @pytest.mark.parametrize("size", [(48, 48), (48, 80)])
    def test_everything_on_gives_uint8_of_the_size(self, photo: Tensor, crop: str, size: tuple[int, int]) -> None:
        transform = train_transform(size, crop=crop, vflip=0.5, dihedral=True, three_augment=True, color_jitter=0.3)
        for image in (photo, photo.transpose(1, 2), photo[:, :5, :7]):
            for _ in range(4):
                result = transform(image)
                assert result.shape == (3, *size)
                assert result.dtype == torch.uint8

    def test_random_resized_keeps_the_share_it_was_told(self) -> None:
        """An image that holds its own coordinates shows what was cut out of it."""
        rows, columns = torch.meshgrid(torch.arange(200), torch.arange(200), indexing="ij")
        image = torch.stack([rows, columns, rows]).to(torch.uint8)
        transform = train_transform((50, 50), scale=(0.25, 0.25), ratio=(1.0, 1.0), hflip=0.0, interpolation="bilinear")
        starts = set()
        for _ in range(20):
            result = transform(image).int()
            height, width = (result[k, -1, -1] - result[k, 0, 0] for k in (0, 1))
            assert abs(height - 98) <= 1
            assert abs(width - 98) <= 1
            starts.add(tuple(result[:2, 0, 0].tolist()))
        assert len(starts) > 15

    def test_simple_crop_is_a_shift_over_a_reflected_border(self, photo: Tensor) -> None:
        image = photo[:, :40, :60]
        padded = np.pad(image.numpy(), ((0, 0), (4, 4), (4, 4)), mode="reflect")
        shifts = {(y, x): padded[:, y : y + 40, x : x + 60] for y in range(9) for x in range(9)}
        transform = train_transform((40, 60), crop="simple", hflip=0.0)
        seen = set()
        for _ in range(60):
            result = transform(image).numpy()
            seen.add(next(shift for shift, expected in shifts.items() if np.array_equal(result, expected)))
        assert len(seen) > 25

    def test_resize_squeezes_the_whole_image(self, photo: Tensor) -> None:
        result = train_transform((64, 64), crop="resize", hflip=0.0)(photo)
        expected = from_pillow(as_pillow(photo).resize((64, 64), Image.Resampling.BICUBIC))
        assert (result.int() - expected.int()).abs().max() <= 2

    def test_flips(self, photo: Tensor) -> None:
        image = photo[:, :32, :32]
        for options, expected in (
            ({"hflip": 1.0}, image.flip(2)),
            ({"hflip": 0.0, "vflip": 1.0}, image.flip(1)),
            ({"hflip": 0.0}, image),
        ):
            assert torch.equal(train_transform((32, 32), crop="resize", **options)(image), expected)

    def test_dihedral_is_uniform_over_all_symmetries(self, photo: Tensor) -> None:
        square, rectangle = photo[:, :24, :24], photo[:, :24, :36]
        for image, turns in ((square, (0, 1, 2, 3)), (rectangle, (0, 2))):
            array = image.numpy()
            symmetries = {np.rot90(base, k, (1, 2)).tobytes() for base in (array, array[:, :, ::-1]) for k in turns}
            assert len(symmetries) == 2 * len(turns)
            transform = RandomSymmetry(is_square=image is square)
            counts = Counter(transform(image).contiguous().numpy().tobytes() for _ in range(800))
            assert set(counts) == symmetries
            expected = 800 / len(symmetries)
            assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())

    def test_three_augment_against_pillow(self, photo: Tensor) -> None:
        image = photo[:, :64, :64]
        grey = from_pillow(as_pillow(image).convert("L").convert("RGB"))
        solarized = from_pillow(ImageOps.solarize(as_pillow(image), 128))
        transform, kinds = ThreeAugment((64, 64)), Counter()
        for _ in range(300):
            result = transform(image)
            if (result.int() - grey.int()).abs().max() <= 1:
                kinds["grey"] += 1
            elif torch.equal(result, solarized):
                kinds["solarized"] += 1
            else:
                kinds["blurred"] += 1
        assert min(kinds[kind] for kind in ("grey", "solarized", "blurred")) > 70
        # Away from the border, which Pillow extends and this mirrors; Pillow's blur is an approximation by boxes.
        expected = from_pillow(as_pillow(image).filter(ImageFilter.GaussianBlur(1.5)))
        difference = (transform._blur(image, 1.5).float() - expected.float())[:, 6:-6, 6:-6].abs()
        assert difference.max() < 8
        assert difference.mean() < 1
        square = v2.functional.gaussian_blur(image, [11, 11], [1.5, 1.5])
        assert (transform._blur(image, 1.5).int() - square.int()).abs().max() <= 1

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"size": (0, 4)}, "size"),
            ({"size": (4, 4, 4)}, "size"),
            ({"size": 4.5}, "size"),
            ({"crop": "centre"}, "random-resized, simple, resize"),
            ({"interpolation": "nearest"}, "bilinear, bicubic"),
            ({"scale": (0.0, 1.0)}, "scale"),
            ({"scale": (0.8, 0.5)}, "scale"),
            ({"ratio": (2.0, 1.0)}, "ratio"),
            ({"hflip": 1.5}, "hflip"),
            ({"vflip": -0.1}, "vflip"),
            ({"color_jitter": -1.0}, "color_jitter"),
            ({"crop": "simple", "size": (4, 32)}, "simple"),
        ],
    )
    def test_errors(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            train_transform(**{"size": (32, 32), **options})

    def test_eval_errors(self) -> None:
        for crop_pct in (0.0, 1.1):
            with pytest.raises(ValueError, match="crop_pct"):
                eval_transform(32, crop_pct=crop_pct)


class TestMixing:
    @pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
    def test_mixup_of_any_batch(self, count: int) -> None:
        """Failure class 27."""
        images, labels = torch.randn(count, 3, 6, 8), torch.arange(count)
        before = images.clone()
        mixed, targets = Mixing(mixup=0.8, num_classes=9)(images, labels, seed=5)
        assert torch.equal(images, before)
        assert mixed.shape == images.shape
        assert targets.shape == (count, 9)
        # Every image and target is the same blend of itself and its partner.
        partners = [(count - i) % count if count % 2 else count - 1 - i for i in range(count)]
        lam = next((float(targets[i, i]) for i in range(count) if partners[i] != i), 1.0)
        assert count == 1 or 0 < lam < 1
        for i, j in enumerate(partners):
            torch.testing.assert_close(mixed[i], lam * images[i] + (1 - lam) * images[j])
            expected = torch.zeros(9)
            expected[i] += lam
            expected[j] += 1 - lam
            torch.testing.assert_close(targets[i], expected)

    @pytest.mark.parametrize("count", [1, 5, 6])
    def test_cutmix_of_any_batch(self, count: int) -> None:
        """Failure class 27."""
        images = torch.arange(count).float().view(-1, 1, 1, 1).expand(-1, 3, 16, 16).contiguous()
        mixed, targets = Mixing(cutmix=1.0, label_smoothing=0.1, num_classes=8)(images, torch.arange(count), seed=1)
        for i in range(count):
            j = (count - i) % count if count % 2 else count - 1 - i
            share = (mixed[i] == i).float().mean()
            assert set(mixed[i].unique().tolist()) <= {float(i), float(j)}
            assert float(targets[i, i]) == pytest.approx(float(share) * 0.9 + 0.1 / 8)
        torch.testing.assert_close(targets.sum(1), torch.ones(count))

    def test_seed(self) -> None:
        images, labels, mixing = torch.randn(4, 3, 8, 8), torch.arange(4), Mixing(mixup=1.0, cutmix=1.0, num_classes=4)
        state = np.random.get_state()[1].copy()
        draws = [mixing(images, labels, seed=seed)[1] for seed in (0, 1, 0)]
        assert torch.equal(draws[0], draws[2])
        assert not torch.equal(draws[0], draws[1])
        assert np.array_equal(np.random.get_state()[1], state)

    @pytest.mark.parametrize(
        ("options", "message"),
        [({}, "leave Mixing out"), ({"mixup": -1.0, "cutmix": 1.0}, "negative"), ({"mixup": 1.0, "prob": 2.0}, "prob")],
    )
    def test_errors(self, options: dict[str, float], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Mixing(num_classes=2, **options)
