"""Ultralytics' SAM 2: the only file that imports it (extra `[ultralytics]`, AGPL-3.0), and only when asked to."""

from __future__ import annotations

import importlib
import os
import tempfile
import warnings
from types import ModuleType

# Without these, importing it looks up hosts, installs packages at run time and writes settings into the home folder.
SWITCHES = {"YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "0", "YOLO_VERBOSE": "false"}


def ultralytics_module(name: str) -> ModuleType:
    """Import a module of Ultralytics, with its offline switches set and the environment left as it was.

    Args:
        name: dotted name without the package's own, for instance "models.sam.modules.utils".

    Raises: ImportError where the extra is not installed.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="vision_rope_") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its import warns on some platforms
        for switch, value in {**SWITCHES, "YOLO_CONFIG_DIR": folder}.items():
            os.environ.setdefault(switch, value)
        try:
            return importlib.import_module(f"ultralytics.{name}")
        finally:
            # It sets variables that silence the logs of torch's C++ code in this process and its children.
            os.environ.clear()
            os.environ.update(before)
