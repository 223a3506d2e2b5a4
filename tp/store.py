"""Writes a model as a q8 store, a piece at a time; killed at any moment, it goes on from there.

Beside the shards lies a journal of what is safely on disk. A shard is written under another name
and renamed when it is whole; the manifest comes last and the journal goes. So a directory with a
manifest is finished, and one without is never loaded.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tp.source import Source
from tp.store_file import (
    FORMAT,
    JOURNAL,
    MANIFEST,
    METADATA,
    VERSION,
    Progress,
    open_store,
    read_manifest,
)
from tp.store_journal import (
    BESIDE,
    PART,
    Journal,
    Stamp,
    StoreError,
    check_unchanged,
    directory,
    identity_digest,
    identity_of,
    read_journal,
    resumed,
    settle_directory,
    write_whole,
    writing,
)
from tp.store_plan import Plan, Shard, plan_of
from tp.store_shard import write_shard

SHARD_SIZE = 1_000_000_000  # bytes
# After so many bytes of a shard the journal says how far it is.
MARK = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Written:
    """A store that is finished; `whole` says that it was so before."""

    shards: int
    bytes: int
    whole: bool = False


def convert(
    source: Source,
    out: Path,
    *,
    model: str,
    shard_size: int | None = None,
    mark: int = MARK,
    progress: Progress = lambda what, done, of: None,
    resumes: Callable[[int, int], None] = lambda there, of: None,
) -> Written:
    """Write a model as a q8 store, or go on with one; a store of it that is whole stays as it is.

    `model` is what the user calls it; `shard_size` is in bytes, by default that with which it
    began. `resumes` is told, before it goes on, how many bytes are there of how many. Raises
    StoreError where `out` cannot be written or is something else, or the source is not what it
    was when the conversion began; CheckpointError where its tensors are not those of the model.
    """
    if source.checkpoint.is_store:
        raise StoreError(f"{source.path}: is a q8 store already; give the model it came from")
    begun = read_journal(out)
    if shard_size is None:
        shard_size = SHARD_SIZE if begun is None else begun.shard_size
    plan = plan_of(source, shard_size)
    with directory(out):
        old = read_journal(out)
        stamps = identity_of(source, {} if old is None else old.source, progress)
        if (out / MANIFEST).exists():
            return _whole_already(stamps, out, model)
        new = Journal(model=model, shard_size=shard_size, plan=plan.digest, source=stamps)
        writing_it = _Writing(
            source=source,
            plan=plan,
            out=out,
            journal=resumed(old, new, out),
            mark=mark,
            progress=progress,
        )
        if old is not None:
            resumes(writing_it.take_up(), plan.nbytes)
        return writing_it.run()


def _whole_already(stamps: dict[str, Stamp], out: Path, model: str) -> Written:
    """A finished store, of which only the journal may have been left."""
    open_store(out)
    manifest = read_manifest(out)
    if manifest["source"]["sha256"] != identity_digest(stamps):
        raise StoreError(f"{out}: is a q8 store of another model than {model}; name a new place")
    with writing(out):
        (out / JOURNAL).unlink(missing_ok=True)
    sizes = [said["bytes"] for name, said in manifest["files"].items() if name.startswith("q8-")]
    return Written(shards=len(sizes), bytes=sum(sizes), whole=True)


@dataclass(kw_only=True)
class _Writing:
    """A conversion on its way; `done` are the bytes of whole shards."""

    source: Source
    plan: Plan
    out: Path
    journal: Journal
    mark: int
    progress: Progress
    done: int = 0

    def take_up(self) -> int:
        """Keep what is there of the shards that the journal names; how many bytes that is."""
        said, self.journal.shards = self.journal.shards, {}
        for shard in self.plan.shards[: len(said)]:
            file = self.out / shard.file
            if not file.exists():
                self._rename(file)  # it was stopped just before
            if not file.exists() or file.stat().st_size != shard.nbytes:
                self.journal.begun = None
                break
            self.journal.shards[shard.file] = said[shard.file]
            self.done += shard.nbytes
        return self._there

    @property
    def _there(self) -> int:
        return self.done + (0 if self.journal.begun is None else self.journal.begun.bytes)

    def run(self) -> Written:
        self._check_room(self.plan.nbytes - self._there)
        self.journal.save(self.out)
        beside = dict(self._beside())
        for shard in self.plan.shards[len(self.journal.shards) :]:
            self._write(shard)
        check_unchanged(self.source, self.journal.source, self.out)
        write_whole(self.out / MANIFEST, self._manifest(beside))
        with writing(self.out):
            (self.out / JOURNAL).unlink()
        return Written(shards=len(self.plan.shards), bytes=self.plan.nbytes)

    def _rename(self, file: Path) -> None:
        """Give a shard its name, if it has been written."""
        if _part(file).exists():
            with writing(file):
                os.replace(_part(file), file)
                settle_directory(self.out)

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self.out).free
        if free < needed:
            raise StoreError(
                f"{self.out}: {needed:,} bytes are to be written and {free:,} are free; make room "
                "or name another place"
            )

    def _beside(self) -> Iterator[tuple[str, Stamp]]:
        """Write the config and what spells; each file's name and stamp."""
        for name, data in _described(self.source):
            file = self.out / name
            with writing(file):
                file.parent.mkdir(exist_ok=True)
            write_whole(file, data)
            yield name, Stamp(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    def _write(self, shard: Shard) -> None:
        """Write a shard, from where the journal says on."""

        def marked(stamp: Stamp) -> None:
            self.journal.begun = stamp
            self.journal.save(self.out)

        file = self.out / shard.file
        stamp = write_shard(
            shard,
            self.source.checkpoint,
            _part(file),
            begun=self.journal.begun,
            mark=self.mark,
            marked=marked,
            progress=lambda name, at: self.progress(name, self.done + at, self.plan.nbytes),
        )
        self.journal.shards[shard.file] = stamp
        self.journal.begun = None
        self.journal.save(self.out)
        self._rename(file)
        self.done += stamp.bytes

    def _manifest(self, beside: dict[str, Stamp]) -> bytes:
        checkpoint = self.source.checkpoint
        stamps = self.journal.source
        said = {
            "format": FORMAT,
            "version": VERSION,
            "files": {n: stamp.public for n, stamp in {**self.journal.shards, **beside}.items()},
            "source": {
                "format": checkpoint.format,
                "sha256": identity_digest(stamps),
                "files": {name: stamp.public for name, stamp in stamps.items()},
                "tensors": {name: list(t.shape) for name, t in checkpoint.tensors.items()},
            },
            "skipped": self.plan.skipped,
        }
        return json.dumps(said, indent=1).encode()


def _described(source: Source) -> Iterator[tuple[str, bytes]]:
    """The files beside the weights that a running model needs."""
    if source.checkpoint.format == "gguf":
        # Tokens may be pieces of UTF-8, which JSON holds escaped.
        yield METADATA, json.dumps(source.checkpoint.config).encode()
        return
    for pattern in BESIDE:
        for file in sorted(source.path.glob(pattern)):
            yield str(file.relative_to(source.path)), file.read_bytes()


def _part(file: Path) -> Path:
    return file.with_name(file.name + PART)
