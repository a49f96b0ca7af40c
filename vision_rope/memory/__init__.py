"""SAM 2 style memory: attention to stored frames and object pointers, their encoder, and the bank that holds them."""

from vision_rope.memory.attention import MemoryAttention, MemoryEntry
from vision_rope.memory.bank import MemoryBank, StoredFrame, StoredPointer
from vision_rope.memory.encoder import MemoryEncoder
from vision_rope.memory.replace import replace_memory_attention
from vision_rope.memory.selection import Gate, MemoryPolicy
from vision_rope.memory.video_memory import VideoMemory, load_video_memory, memory_version

__all__ = [
    "Gate",
    "MemoryAttention",
    "MemoryBank",
    "MemoryEncoder",
    "MemoryEntry",
    "MemoryPolicy",
    "StoredFrame",
    "StoredPointer",
    "VideoMemory",
    "load_video_memory",
    "memory_version",
    "replace_memory_attention",
]
