"""Lightning checkpoints that are either whole or absent."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins import TorchCheckpointIO

from mens_exp.artifacts import atomic
from mens_exp.artifacts.checkpoint_digests import record_digest, refuse_damaged
from mens_exp.artifacts.digest import sha256_bytes

__all__ = ["AtomicCheckpointIO"]


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the place, syncs, and renames; the first of several processes reads for all.

    The digest of what was written is recorded, and checked before anything is restored.
    """

    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
    ) -> None:
        """Write a checkpoint."""
        assert storage_options is None, "local files take no storage options"
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        content = buffer.getvalue()
        record_digest(target, sha256_bytes(content))
        atomic.write_bytes(target, content)

    def load_checkpoint(self, path: str | Path, *arguments: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint; other machines need not see the file."""
        if not torch.distributed.is_initialized():
            refuse_damaged(Path(path))
            return super().load_checkpoint(path, *arguments, **options)
        box: list[Any] = [None]
        if torch.distributed.get_rank() == 0:
            refuse_damaged(Path(path))
            box = [super().load_checkpoint(path, *arguments, **options)]
        torch.distributed.broadcast_object_list(box, src=0)
        read: dict[str, Any] = box[0]
        return read
