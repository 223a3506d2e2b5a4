"""What a conversion knows of itself on disk: what the source was, what is written so far."""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tp.safetensors_file import INDEX, read_json
from tp.source import Source
from tp.store_file import FORMAT, JOURNAL, MANIFEST, VERSION, Progress, hashed
from tp.stored import CheckpointError

PART = ".part"  # of a file that is being written
# What a directory has beside its weights that a running model needs.
BESIDE = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)


class StoreError(ValueError):
    """A store that cannot be written: where, what was found, what would do."""


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """A file of the source, or one that was written: its length and digest."""

    bytes: int
    sha256: str
    changed: int = 0  # when, in nanoseconds; of a source's files

    @property
    def public(self) -> dict[str, Any]:
        """What a manifest says of it: the same on every machine."""
        return {"bytes": self.bytes, "sha256": self.sha256}


@dataclass(kw_only=True)
class Journal:
    """How far a conversion is; `begun` is how much of the first shard not in `shards` is safe."""

    model: str
    shard_size: int
    plan: str
    source: dict[str, Stamp]
    shards: dict[str, Stamp] = field(default_factory=dict)
    begun: Stamp | None = None

    def save(self, out: Path) -> None:
        """Put it in place of the one before."""
        said = {"format": FORMAT, "version": VERSION, **asdict(self)}
        write_whole(out / JOURNAL, json.dumps(said, indent=1).encode())


def read_journal(out: Path) -> Journal | None:
    """The journal of an unfinished store, if there is one; StoreError where it is not ours."""
    if not (out / JOURNAL).exists():
        return None
    try:
        said = read_json(out / JOURNAL)
        if (said.pop("format"), said.pop("version")) != (FORMAT, VERSION):
            raise _strange(out)
        for key in ("source", "shards"):
            said[key] = {file: Stamp(**stamp) for file, stamp in said[key].items()}
        said["begun"] = None if said["begun"] is None else Stamp(**said["begun"])
        return Journal(**said)
    except (CheckpointError, LookupError, TypeError, AttributeError) as error:
        raise _strange(out) from error


def resumed(old: Journal | None, new: Journal, out: Path) -> Journal:
    """What to go on from: the journal found, if it is of the same conversion as the new one."""
    if old is None:
        return new
    changed = unlike(old.source, new.source)
    if changed:
        raise StoreError(
            f"{out}: {', '.join(changed)} of {new.model} changed since this conversion began; "
            f"remove {out} and convert again"
        )
    if old.shard_size != new.shard_size:
        raise StoreError(
            f"{out}: was begun with --shard-size {old.shard_size}; give the same again, or remove "
            f"{out}"
        )
    if old.plan != new.plan:
        raise StoreError(
            f"{out}: was begun by another version of anyfold, which cut it otherwise; remove {out} "
            "and convert again"
        )
    return replace(new, shards=old.shards, begun=old.begun)


def _strange(out: Path) -> StoreError:
    return StoreError(
        f"{out / JOURNAL}: is not a journal of this version; remove {out} and convert again"
    )


# --- The source


def source_files(source: Source) -> dict[str, Path]:
    """The files that a model is read from, by their names."""
    if source.checkpoint.format == "gguf":
        return {source.path.name: source.path}
    found = [*{tensor.file for tensor in source.checkpoint.tensors.values()}]
    found += [file for pattern in (*BESIDE, INDEX) for file in source.path.glob(pattern)]
    return {str(file.relative_to(source.path)): file for file in sorted(found)}


def identity_of(source: Source, known: Mapping[str, Stamp], progress: Progress) -> dict[str, Stamp]:
    """The stamps of a source's files; those that look as they did when they were `known` are."""
    files = source_files(source)
    total, done = sum(file.stat().st_size for file in files.values()), 0
    found = {}
    for name, file in files.items():
        size, changed = _looks(file)
        stamp = known.get(name)
        if stamp is None or (stamp.bytes, stamp.changed) != (size, changed):
            stamp = Stamp(bytes=size, sha256=hashed(file).hexdigest(), changed=changed)
        found[name] = stamp
        done += size
        progress("digests of the source", done, total)
    return found


def check_unchanged(source: Source, stamps: Mapping[str, Stamp], out: Path) -> None:
    """Raise StoreError where a file of the source was written to while it was converted."""
    files = source_files(source)
    now = {name: _looks(file) for name, file in files.items() if file.exists()}
    changed = [name for name, s in stamps.items() if now.get(name) != (s.bytes, s.changed)]
    if changed:
        raise StoreError(
            f"{source.path}: {', '.join(changed)} changed while it was converted; remove {out} "
            "and convert again"
        )


def unlike(old: Mapping[str, Stamp], new: Mapping[str, Stamp]) -> list[str]:
    """The files that are not the same in both."""
    names = sorted({*old, *new})
    return [n for n in names if n not in old or n not in new or old[n].sha256 != new[n].sha256]


def identity_digest(stamps: Mapping[str, Stamp]) -> str:
    """One digest of all files: of the lines that sha256sum would print, in order."""
    lines = (f"{stamp.sha256}  {name}\n" for name, stamp in sorted(stamps.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _looks(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


# --- The directory


@contextmanager
def directory(out: Path) -> Iterator[None]:
    """A directory to write a store into, new or ours, that nobody else writes into meanwhile."""
    if out.exists() and not out.is_dir():
        raise StoreError(f"{out}: exists and is no directory; name a new one")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        held = sorted(entry.name for entry in out.iterdir())
        lock = os.open(out, os.O_RDONLY)
    ours = MANIFEST in held or JOURNAL in held
    try:
        if not ours and set(held) - {JOURNAL + PART}:
            named = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
            raise StoreError(
                f"{out}: exists and is no q8 store; it holds {named}: name a new directory"
            )
        # Some file systems lock no directories: there nobody is kept out.
        with suppress(OSError):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise StoreError(f"{out}: another conversion is writing it; wait for it") from None
        yield
    finally:
        os.close(lock)


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """What goes wrong with a file that is written, as StoreError."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{file}: cannot be written ({error.strerror}); mend that and run convert again: it "
            "goes on where it stopped"
        ) from error


def write_whole(file: Path, data: bytes) -> None:
    """Write a file that is there whole or, whatever happens, as it was before."""
    part = file.with_name(file.name + PART)
    with writing(file):
        with part.open("wb") as stream:
            stream.write(data)
            settle(stream.fileno())
        os.replace(part, file)
        settle_directory(file.parent)


def settle(descriptor: int) -> None:
    """Wait until what was written is on disk."""
    os.fsync(descriptor)


def settle_directory(path: Path) -> None:
    """Wait until names are on disk as they are now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
