"""Tensors in a safetensors file: written in one pass, read piecewise, trusted in nothing.

The format is a length, a JSON header that says where each tensor lies, and the bytes. It cannot
hold code. Tensors are written from where they lie and read to where they belong, a bounded chunk at
a time, whatever their size and device.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from shardstep.checkpoint.errors import CheckpointError
from shardstep.params.storage import flat
from shardstep.plan import Box, Interval, boxes, contiguous
from shardstep.state.limits import is_counts, is_sizes

CHUNK_NBYTES = 16 * 2**20
MAX_HEADER_NBYTES = 100 * 2**20

Progress = Callable[[int], None]
"""Told how many more bytes were read or written."""

Stages = Callable[[str, int], Progress]
"""Told what is about to be done and with how many bytes; returns who is told how far it is."""

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True, slots=True)
class Digest:
    """How long a file is, and what is in it."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Streamed:
    """A tensor that is nowhere in memory: parts of it are read as they are written.

    Attributes:
        dtype, shape: its form.
        read: copies a box of it into a contiguous tensor of the box's shape, on the CPU.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[Box, torch.Tensor], None]

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


Source = torch.Tensor | Streamed
"""What can be written to a file."""


def no_progress(nbytes: int) -> None:
    """Tell nobody."""


def no_stages(what: str, nbytes: int) -> Progress:
    """Tell nobody."""
    return no_progress


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU, which has to be kept alive meanwhile."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def form_of(dtype: torch.dtype, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
    """How a file describes such a tensor: as it is, or as bytes if it has no name for the dtype."""
    if dtype in _NAMES:
        return dtype, tuple(shape)
    return torch.uint8, (math.prod(shape) * dtype.itemsize,)


def write(
    path: Path,
    tensors: Mapping[str, Source],
    metadata: Mapping[str, str] | None = None,
    progress: Progress = no_progress,
) -> Digest:
    """Write a new file and see it onto the disk.

    Args:
        path: where; there must be nothing yet.
        tensors: what, by name. Dtypes that the format does not know are written as bytes.
        metadata: text for the header.
        progress: told of every chunk.

    Returns:
        The digest of what was written.

    Raises:
        OSError: if it could not be written; what is there then is not complete.
        ValueError: if the format cannot hold it.
    """
    if "__metadata__" in tensors:
        raise ValueError("a tensor cannot be called '__metadata__' in a safetensors file")
    # The widest first, so that each tensor lies at a multiple of its element size.
    order = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        dtype, shape = form_of(tensor.dtype, tensor.shape)
        header[name] = {
            "dtype": _NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_NBYTES:
        raise ValueError(
            f"{path} would have a header of {len(text):,} bytes, more than is read: {len(order):,} "
            "tensors are too many for one file"
        )
    total = 0
    with naming_written(path), open(path, "xb", buffering=0) as file, _Hasher() as hasher:

        def put(data: memoryview | bytes) -> None:
            # Both let other threads run: hashing costs no time of its own where there is a core.
            hasher.begin(data)
            written = 0
            while written < len(data):
                written += file.write(memoryview(data)[written:])
            hasher.finish()

        put(len(text).to_bytes(8, "little") + text)
        total = 8 + len(text)
        for name in order:
            for chunk in _chunks(tensors[name]):
                put(raw_bytes(chunk))
                total += chunk.nbytes
                progress(chunk.nbytes)
        os.fsync(file.fileno())
    return Digest(total, hasher.digest.hexdigest())


class _Hasher:
    """Computes a digest in a thread of its own, while what goes into it is written.

    Not an executor of the standard library: those take nothing more when the program is ending, and
    a save in the background may outlive the main thread.

    Attributes:
        digest: of all that was begun and finished.
    """

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._given: SimpleQueue[memoryview | bytes | None] = SimpleQueue()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Hasher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # Whoever leaves early frees the memory that is being read.
        self._given.put(None)
        self._thread.join()

    def begin(self, data: memoryview | bytes) -> None:
        """Take this in."""
        self._given.put(data)

    def finish(self) -> None:
        """Wait until it has been."""
        self._finished.get()

    def _run(self) -> None:
        while (data := self._given.get()) is not None:
            self.digest.update(data)
            self._finished.put(None)


@contextmanager
def naming_written(path: Path) -> Iterator[None]:
    """Have what goes wrong while a file is written say which file it was."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _chunks(tensor: Source) -> Iterator[torch.Tensor]:
    """The bytes of a tensor in C order, as contiguous pieces on the CPU."""
    if isinstance(tensor, Streamed):
        yield from _stretches(tensor)
        return
    tensor = tensor.detach().resolve_conj().resolve_neg()
    raw = flat(tensor.contiguous()).view(torch.uint8)
    for start in range(0, raw.nbytes, CHUNK_NBYTES):
        yield raw[start : start + CHUNK_NBYTES].cpu()


def _stretches(source: Streamed) -> Iterator[torch.Tensor]:
    """The elements of a tensor that is yet to be read, each stretch in the memory of the last."""
    total = math.prod(source.shape)
    at_once = max(1, CHUNK_NBYTES // source.itemsize)
    buffer = torch.empty(min(total, at_once), dtype=source.dtype, device="cpu")
    for start in range(0, total, at_once):
        interval = Interval(start, min(total, start + at_once))
        for stretch, box in boxes(interval, source.shape, contiguous(source.shape)):
            source.read(box, buffer[stretch.shift(-start).slice].view(box.sizes))
        yield buffer[: interval.numel]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies in a file: its first and last byte, and its form."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    nbytes: int


class File:
    """A safetensors file, opened and found to be well-formed.

    Args:
        path: the file.

    Attributes:
        entries: the tensors in it.
        metadata: the text in its header.

    Raises:
        CheckpointError: if it is not there, not a plain file, or not well-formed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_plain(path)
        try:
            self.entries, self.metadata = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        size = os.fstat(self._file.fileno()).st_size
        with naming(self._path):
            length = int.from_bytes(self._file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_NBYTES):
                raise self._bad(f"its header cannot be {length:,} bytes long in a file of {size:,}")
            text = self._file.read(length)
        header = parse_json(text, self._path)
        if not isinstance(header, dict):
            raise self._bad("its header is not a JSON object")
        metadata = header.pop("__metadata__", {})
        texts = isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
        if not texts:
            raise self._bad("the metadata in its header is not text")
        entries = {name: self._entry(name, item, 8 + length) for name, item in header.items()}
        end = 8 + length
        for name, entry in sorted(
            entries.items(), key=lambda each: (each[1].start, each[1].nbytes)
        ):
            if entry.start != end:
                raise self._bad(f"tensor {name!r} does not begin where the one before it ends")
            end += entry.nbytes
        if end != size:
            raise self._bad(f"it is {size:,} bytes long, but its tensors end at {end:,}")
        return entries, metadata

    def _entry(self, name: str, item: Any, base: int) -> Entry:
        try:
            dtype, shape = _DTYPES[item["dtype"]], item["shape"]
            start, stop = item["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise self._bad(f"tensor {name!r} is not described as it should be") from error
        if not (is_sizes(shape) and is_counts([start, stop]) and start <= stop):
            raise self._bad(f"tensor {name!r} has impossible sizes")
        if math.prod(shape) * dtype.itemsize != stop - start:
            raise self._bad(f"tensor {name!r} does not take the bytes that its shape needs")
        return Entry(dtype, tuple(shape), base + start, stop - start)

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}; the file is damaged or not safetensors")

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> Entry:
        """Where a tensor lies, if it is there and has the bytes that its form needs.

        Raises:
            CheckpointError: if it is not, or has not.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self._path}: there is no tensor {name!r}; the file is damaged")
        if math.prod(shape) * dtype.itemsize != entry.nbytes:
            raise CheckpointError(
                f"{self._path}: tensor {name!r} has {entry.nbytes:,} bytes, which is not {dtype} "
                f"of shape {tuple(shape)}"
            )
        return entry

    def read(
        self, name: str, dtype: torch.dtype, shape: Sequence[int], part: Box, target: torch.Tensor
    ) -> None:
        """Copy a part of a tensor into `target`, a bounded chunk at a time.

        Args:
            name: which tensor.
            dtype: what its bytes are.
            shape: the shape it has.
            part: which part of it.
            target: where to; of the part's shape, on any device and of any dtype.

        Raises:
            CheckpointError: if the file has no such tensor, or cannot be read.
        """
        entry = self.check(name, dtype, shape)
        if part.numel:
            self._read_rows(entry.start, dtype, tuple(shape), part, target)

    def _read_rows(
        self, start: int, dtype: torch.dtype, shape: Sequence[int], part: Box, target: torch.Tensor
    ) -> None:
        """Read a part by rows of the first dimension; of large rows, in turn, only the part."""
        if not shape:
            self._fetch(start, target.view(1), dtype, [1])
            return
        row_nbytes = math.prod(shape[1:]) * dtype.itemsize
        first, count = part.offsets[0], part.sizes[0]
        inner = Box(part.offsets[1:], part.sizes[1:])
        partial = inner != Box.whole(shape[1:])
        # Of a row that is wanted in part, reading all of it is cheaper than many small reads, up to
        # a point; and no row is read at once that is larger than a chunk.
        if row_nbytes > (CHUNK_NBYTES // 16 if partial else CHUNK_NBYTES):
            for row in range(count):
                offset = start + (first + row) * row_nbytes
                self._read_rows(offset, dtype, shape[1:], inner, target[row])
            return
        at_once = max(1, CHUNK_NBYTES // max(1, row_nbytes))
        for row in range(0, count, at_once):
            rows = min(at_once, count - row)
            offset = start + (first + row) * row_nbytes
            into = target[row : row + rows]
            if not partial:
                self._fetch(offset, into, dtype, [rows, *shape[1:]])
                continue
            slab = torch.empty([rows, *shape[1:]], dtype=dtype, device="cpu")
            self._fetch(offset, slab, dtype, list(slab.shape))
            for dim, (begin, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True), 1):
                slab = slab.narrow(dim, begin, size)
            into.copy_(slab)

    def _fetch(
        self, offset: int, target: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]
    ) -> None:
        """Read contiguous bytes into `target`, directly where it has their form."""
        direct = target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous()
        into = target if direct else torch.empty(shape, dtype=dtype, device="cpu")
        buffer, done = raw_bytes(into), 0
        while done < len(buffer):
            with naming(self._path):
                got = os.preadv(self._file.fileno(), [buffer[done:]], offset + done)
            if not got:
                raise CheckpointError(f"{self._path}: the file ended while it was being read")
            done += got
        if into is not target:
            target.copy_(into)


def open_plain(path: Path) -> Any:
    """Open a file for reading, if it is one: no link, pipe or device.

    Raises:
        CheckpointError: if it is not there or not a plain file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be opened as a plain file ({error.strerror})"
        ) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is not a plain file")
    return os.fdopen(descriptor, "rb", buffering=0)


def digest_of(path: Path, progress: Progress = no_progress) -> Digest:
    """Read a whole file for its digest.

    Raises:
        CheckpointError: if it is not there or not a plain file.
    """
    digest = hashlib.sha256()
    nbytes = 0
    buffer = memoryview(bytearray(4 * 2**20))
    with open_plain(path) as file, naming(path):
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
            nbytes += got
            progress(got)
    return Digest(nbytes, digest.hexdigest())


def parse_json(text: bytes, path: Path) -> Any:
    """What a JSON text says.

    Raises:
        CheckpointError: if it is none.
    """
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: is not readable as JSON ({error}); it is damaged"
        ) from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, if it says each thing once: of two, readers would choose as they like."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("something is said twice")
    return found


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have what goes wrong while a file is read say which file it was."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
