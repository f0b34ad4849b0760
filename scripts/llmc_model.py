"""llm.c's model file and the same tensors under Hugging Face's names: what export_hf.py and import_hf.py share.

    file     256 x int32 header: 20240326, version, maxT, V, L, NH, C, Vp, zeros; then the 16 tensors of
             Shape.tensors() one after another, each with all its layers; version 3 as FP32, version 5 as BF16;
             little-endian, nothing between
    theirs   one tensor per layer; linear layers are transposed, (in, out), what GPT2LMHeadModel calls Conv1D; wte has
             V rows: the padding to Vp, a multiple of 128, is zero in the file and does not exist there

BF16 is ml_dtypes' bfloat16, which rounds to nearest even. Whatever cannot be done ends as a ModelError of one line.
"""

import contextlib
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from typing import NamedTuple

try:
    import numpy as np
    from ml_dtypes import bfloat16
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import save_file

    MISSING_PACKAGE = None
except ImportError as error:
    MISSING_PACKAGE = str(error).splitlines()[0]

MAGIC = 20240326
HEADER_BYTES = 1024
VERSIONS = {3: "fp32", 5: "bf16"}  # version of the file -> what its tensors are
LAYER_NORM_EPSILON = 1e-5


class ModelError(Exception):
    """What stands in the way, as one line for the user."""


def require(condition, text):
    if not condition:
        raise ModelError(text)


def dtype_of(name):
    """numpy's type for "fp32" or "bf16"."""
    return np.dtype(bfloat16) if name == "bf16" else np.dtype("<f4")


# ----------------------------------------------------------------------------------------------------------------------
# shape and tensors


class Tensor(NamedTuple):
    name: str  # llm.c's
    their_name: str  # Hugging Face's, without "transformer."; {} is the layer
    layers: int  # 1, or L
    size: tuple  # of one layer, as the model file has it
    is_linear: bool  # transposed there


@dataclass
class Shape:
    """The model's sizes, as the header has them."""

    max_seq_len: int
    vocab_size: int
    num_layers: int
    num_heads: int
    channels: int

    @property
    def padded_vocab_size(self):
        return (self.vocab_size + 127) // 128 * 128

    def check(self, origin):
        """One error line when train_gpt_fp8 cannot run this shape (gpt_check in lib/config.h). Also bounds sizes."""
        layers, heads, channels = self.num_layers, self.num_heads, self.channels
        require(1 <= layers <= 1024, f"{origin}: {layers} layers, want 1 to 1024")
        require(
            16 <= channels <= 65536 and channels % 16 == 0,
            f"{origin}: {channels} channels, want a multiple of 16 up to 65536",
        )
        require(heads >= 1 and channels % heads == 0, f"{origin}: {channels} channels do not divide into {heads} heads")
        head_size = channels // heads
        require(
            head_size % 8 == 0 and head_size <= 256,
            f"{origin}: head size {head_size} ({channels} channels / {heads} heads), want a multiple of 8 up to 256",
        )
        require(1 <= self.max_seq_len <= 1048576, f"{origin}: {self.max_seq_len} positions, want 1 to 1048576")
        require(
            1 <= self.vocab_size <= 65536,
            f"{origin}: vocabulary of {self.vocab_size}, want 1 to 65536 (16-bit tokens)",
        )

    def tensors(self):
        """The file's tensors, in its order."""
        C, table = self.channels, []
        for name, their_name, *size in [
            ("wte", "wte.weight", self.padded_vocab_size, C),
            ("wpe", "wpe.weight", self.max_seq_len, C),
            ("ln1w", "h.{}.ln_1.weight", C),
            ("ln1b", "h.{}.ln_1.bias", C),
            ("qkvw", "h.{}.attn.c_attn.weight", 3 * C, C),
            ("qkvb", "h.{}.attn.c_attn.bias", 3 * C),
            ("attprojw", "h.{}.attn.c_proj.weight", C, C),
            ("attprojb", "h.{}.attn.c_proj.bias", C),
            ("ln2w", "h.{}.ln_2.weight", C),
            ("ln2b", "h.{}.ln_2.bias", C),
            ("fcw", "h.{}.mlp.c_fc.weight", 4 * C, C),
            ("fcb", "h.{}.mlp.c_fc.bias", 4 * C),
            ("fcprojw", "h.{}.mlp.c_proj.weight", C, 4 * C),
            ("fcprojb", "h.{}.mlp.c_proj.bias", C),
            ("lnfw", "ln_f.weight", C),
            ("lnfb", "ln_f.bias", C),
        ]:
            in_block = "{}" in their_name
            layers = self.num_layers if in_block else 1
            table.append(Tensor(name, their_name, layers, tuple(size), in_block and len(size) == 2))
        return table

    def num_parameters(self):
        return sum(tensor.layers * math.prod(tensor.size) for tensor in self.tensors())


def converted(values, dtype, name):
    """`values` as dtype ("fp32" or "bf16"): the same bits where the type is the same, else rounded to nearest even."""
    want = dtype_of(dtype)
    if values.dtype == want:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        result = values.astype(want)
    overflow = ~np.isfinite(result.astype(np.float32)) & np.isfinite(values.astype(np.float32))
    require(not overflow.any(), f"{name}: {int(overflow.sum())} values are too large for {dtype}")
    return result


# ----------------------------------------------------------------------------------------------------------------------
# the model file


class ModelFile:
    """An llm.c model file for reading. Magic, version, shape and exact size are checked before anything is read."""

    def __init__(self, path):
        self.path = path
        self.file = open(path, "rb")  # closed by __exit__
        try:
            self.read_header()
        except BaseException:
            self.file.close()
            raise

    def read_header(self):
        path, size = self.path, os.fstat(self.file.fileno()).st_size
        raw = self.file.read(HEADER_BYTES)
        require(
            len(raw) == HEADER_BYTES,
            f"'{path}' is no llm.c model file: {size} bytes, want a header of {HEADER_BYTES}",
        )
        header = [int(word) for word in np.frombuffer(raw, "<i4")]
        require(header[0] == MAGIC, f"'{path}' is no llm.c model file: first word {header[0]}, want {MAGIC}")
        require(
            header[1] in VERSIONS, f"'{path}' is a model file of version {header[1]}, want 5 (BF16) or 3 (FP32)"
        )
        self.dtype = VERSIONS[header[1]]
        self.shape = Shape(*header[2:7])
        self.shape.check(path)
        padded = self.shape.padded_vocab_size
        require(
            header[7] == padded,
            f"'{path}': padded vocabulary of {header[7]}, want {padded} for {self.shape.vocab_size} tokens",
        )
        count = self.shape.num_parameters()
        want = HEADER_BYTES + count * dtype_of(self.dtype).itemsize
        require(
            size == want,
            f"'{path}' is damaged: {size} bytes, want {want} for the {count} parameters that its header announces",
        )
        self.offsets, offset = {}, HEADER_BYTES
        for tensor in self.shape.tensors():
            self.offsets[tensor.name] = offset
            offset += tensor.layers * math.prod(tensor.size) * dtype_of(self.dtype).itemsize

    def read(self, tensor, layer):
        """One layer of a tensor, (tensor.size), in the file's type."""
        dtype = dtype_of(self.dtype)
        layer_bytes = math.prod(tensor.size) * dtype.itemsize
        self.file.seek(self.offsets[tensor.name] + layer * layer_bytes)
        raw = self.file.read(layer_bytes)
        require(len(raw) == layer_bytes, f"'{self.path}' became shorter while {tensor.name} was read")
        return np.frombuffer(raw, dtype).reshape(tensor.size)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


def write_model_file(path, shape, dtype, layer_of):
    """Write an llm.c model file. layer_of(tensor, layer) gives an array of tensor.size and that type."""
    with new_file(path) as file:
        version = next(version for version, name in VERSIONS.items() if name == dtype)
        header = np.zeros(HEADER_BYTES // 4, "<i4")
        header[:8] = [MAGIC, version, shape.max_seq_len, shape.vocab_size, shape.num_layers, shape.num_heads,
                      shape.channels, shape.padded_vocab_size]  # fmt: skip
        file.write(header.tobytes())
        for tensor in shape.tensors():
            for layer in range(tensor.layers):
                values = np.ascontiguousarray(layer_of(tensor, layer))
                assert values.shape == tensor.size and values.dtype == dtype_of(dtype), (tensor, values.shape)
                file.write(values.view(np.uint8).data)


# ----------------------------------------------------------------------------------------------------------------------
# files and folders that appear whole or not at all: written under NAME.tmp, synced, renamed


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(path):
    """A file to write to, which has its name only once all of it is on disk."""
    temporary = path + ".tmp"
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
        sync(os.path.dirname(os.path.abspath(path)))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
        raise


# All that an export writes, so all that is ever removed. The last is safetensors' own name for a file being written.
EXPORTED_FILES = re.compile(
    r"(config|generation_config|tokenizer_config|vocab|model\.safetensors\.index)\.json|merges\.txt"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|\.tmp\w{6}"
)


def check_removable(folder):
    """One error line unless `folder` is one that an export wrote, and nothing else is in it."""
    require(os.path.isdir(folder) and not os.path.islink(folder), f"cannot replace '{folder}': it is no folder")
    for name in sorted(os.listdir(folder)):
        require(
            EXPORTED_FILES.fullmatch(name) and not os.path.isdir(os.path.join(folder, name)),
            f"cannot replace '{folder}': '{name}' in it is not of an export's files. Move it, or name another folder",
        )


def remove_exported(folder):
    check_removable(folder)
    for name in os.listdir(folder):
        os.remove(os.path.join(folder, name))
    os.rmdir(folder)


@contextlib.contextmanager
def new_folder(path, force):
    """A folder to write into, which has its name only once all of it is on disk. force: replace an earlier export."""
    temporary, old = path + ".tmp", path + ".old.tmp"
    if os.path.lexists(path):
        require(force or (os.path.isdir(path) and not os.listdir(path)), f"'{path}' exists: --force replaces it")
        check_removable(path)
    for leftover in [temporary] + ([old] if os.path.lexists(path) else []):  # of a run that was killed
        if os.path.lexists(leftover):
            remove_exported(leftover)
    os.mkdir(temporary)
    try:
        yield temporary
        for name in sorted(os.listdir(temporary)):
            sync(os.path.join(temporary, name))
        sync(temporary)
        if os.path.lexists(path):
            os.rename(path, old)
        os.rename(temporary, path)
        sync(os.path.dirname(os.path.abspath(path)))
    except BaseException:
        if os.path.lexists(old) and not os.path.lexists(path):
            os.rename(old, path)
        if os.path.lexists(temporary):
            remove_exported(temporary)
        raise
    if os.path.lexists(old):
        remove_exported(old)


def read_json(path):
    """The object in a JSON file."""
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"'{path}' is no JSON file: {str(error).splitlines()[0]}") from error
    require(isinstance(value, dict), f"'{path}' is no JSON object")
    return value


# ----------------------------------------------------------------------------------------------------------------------


def run(program, argv):
    """program(argv), with its errors as one line each. Returns the exit status: 0 done, 1 not."""
    try:
        if MISSING_PACKAGE is not None and not {"-h", "--help"} & set(argv):
            raise ModelError(f"{MISSING_PACKAGE}. Please: pip install numpy safetensors ml_dtypes")
        program(argv)
    except ModelError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        named = f" '{error.filename}'" if error.filename is not None else ""
        print(f"error: cannot read or write{named}: {error.strerror or error}", file=sys.stderr)
        return 1
    except MemoryError:
        print("error: not enough memory", file=sys.stderr)
        return 1
    return 0
