#!/usr/bin/env python3
"""Turn a GPT2LMHeadModel of Hugging Face's transformers into a model file of train_gpt_fp8 and llm.c.

    scripts/import_hf.py hf/gpt2 gpt2.bin
    ./train_gpt_fp8 -e gpt2.bin -i "data/mine_train*.bin" -j "data/mine_val*.bin" ...

HF_DIR has config.json and the weights: model.safetensors, its shards with model.safetensors.index.json, or
pytorch_model.bin (this one needs PyTorch). Names with and without "transformer." are understood, attention's masks are
left out, the vocabulary is padded with zero rows to a multiple of 128. What train_gpt_fp8 cannot represent is refused
by name: another activation, an LM head of its own, another LayerNorm epsilon or MLP width, tensors too many or too few.

OUT.bin is a version 5 file (BF16) when all of HF_DIR's weights are BF16, else version 3 (FP32), so that nothing is
rounded unless --dtype says so; train_gpt_fp8 starts from either, llm.c's BF16 program from version 5 only. It appears
under its name only when all of it is on disk.

Needs the Python packages numpy, safetensors and ml_dtypes. Exit status: 0 written; 1 not, and why; 2 wrong arguments.
"""

import argparse
import os
import re
import sys

import llmc_model
from llmc_model import ModelError, require

SHARD_NAME = re.compile(r"[\w.-]+\.safetensors")
MASK_NAME = re.compile(r"h\.\d+\.attn\.(masked_)?bias")  # constants, which older files carry along
DTYPES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # safetensors' names of what can be read


# ----------------------------------------------------------------------------------------------------------------------
# config.json


# Settings that change what the model computes: name, GPT2Config's default, what our model is.
FIXED_SETTINGS = [
    ("activation_function", "gelu_new", ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "the tanh GELU, gelu_new"),
    ("layer_norm_epsilon", 1e-5, (llmc_model.LAYER_NORM_EPSILON,), "1e-05"),
    ("scale_attn_weights", True, (True,), "true"),
    ("scale_attn_by_inverse_layer_idx", False, (False,), "false"),
    ("add_cross_attention", False, (False,), "false"),
    ("quantization_config", None, (None,), "none: weights in BF16, FP16 or FP32"),
]


def shape_of(config, path):
    """The Shape that config.json describes; whatever train_gpt_fp8 does differently is refused by name."""
    kind = config.get("model_type", "gpt2")
    require(kind == "gpt2", f"'{path}': model_type {kind!r}, want 'gpt2'")
    architectures = config.get("architectures") or []
    require(
        isinstance(architectures, list) and all(name in ("GPT2LMHeadModel", "GPT2Model") for name in architectures),
        f"'{path}': architectures are {architectures!r}, want ['GPT2LMHeadModel']",
    )
    for name, default, accepted, text in FIXED_SETTINGS:
        found = config.get(name, default)
        require(found in accepted, f"'{path}': {name} is {found!r}, want {text}")
    sizes = {}
    for name in ("n_positions", "vocab_size", "n_layer", "n_head", "n_embd"):
        sizes[name] = config.get(name)
        require(type(sizes[name]) is int, f"'{path}': {name} is {sizes[name]!r}, want a number")
    inner = config.get("n_inner")
    require(
        inner is None or inner == 4 * sizes["n_embd"],
        f"'{path}': n_inner is {inner!r}, want null or 4 * n_embd = {4 * sizes['n_embd']}",
    )
    shape = llmc_model.Shape(*sizes.values())
    shape.check(f"'{path}'")
    return shape


# ----------------------------------------------------------------------------------------------------------------------
# weights. Both kinds of source know: names; size(name) and dtype(name), one of DTYPES's values, without reading the
# tensor; read(name), a numpy array


class SafetensorsWeights:
    def __init__(self, folder):
        self.places, self.files = {}, {}
        whole, index = os.path.join(folder, "model.safetensors"), os.path.join(folder, "model.safetensors.index.json")
        if os.path.isfile(whole):
            self.places = dict.fromkeys(self.open(whole).keys(), whole)
            return
        places = llmc_model.read_json(index).get("weight_map")
        require(isinstance(places, dict), f"'{index}' has no weight_map")
        for name, file in places.items():
            require(
                isinstance(file, str) and SHARD_NAME.fullmatch(file),
                f"'{index}': {name} is said to be in {file!r}, want a .safetensors file beside it",
            )
            self.places[name] = path = os.path.join(folder, file)
            if path not in self.files:
                require(os.path.isfile(path), f"'{index}' names '{file}', which is not there")
                self.open(path)
        for path, file in self.files.items():
            held = set(file.keys())
            lost = [name for name, place in self.places.items() if place == path and name not in held]
            require(not lost, f"'{path}' has no {lost[0] if lost else ''}, which '{index}' says is there")

    def open(self, path):
        try:
            self.files[path] = llmc_model.safe_open(path, framework="np")
        except llmc_model.SafetensorError as error:
            raise ModelError(f"'{path}' is no safetensors file, or damaged: {' '.join(str(error).split())}") from error
        return self.files[path]

    def names(self):
        return list(self.places)

    def size(self, name):
        return tuple(self.files[self.places[name]].get_slice(name).get_shape())

    def dtype(self, name):
        found = self.files[self.places[name]].get_slice(name).get_dtype()
        require(found in DTYPES, f"'{self.places[name]}': {name} is {found}, want one of {', '.join(DTYPES)}")
        return DTYPES[found]

    def read(self, name):
        return self.files[self.places[name]].get_tensor(name)


class TorchWeights:
    def __init__(self, path):
        try:
            import torch
        except ImportError as error:
            raise ModelError(f"'{path}' needs PyTorch ({error}). Please: pip install torch") from error
        self.path, self.torch = path, torch
        try:
            self.tensors = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # what a damaged pickle raises is anybody's guess
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ModelError(f"'{path}' is no file of PyTorch weights, or damaged: {reason}") from error
        require(
            isinstance(self.tensors, dict) and all(isinstance(t, torch.Tensor) for t in self.tensors.values()),
            f"'{path}' holds something else than named tensors",
        )

    def names(self):
        return list(self.tensors)

    def size(self, name):
        return tuple(self.tensors[name].shape)

    def dtype(self, name):
        torch, found = self.torch, self.tensors[name].dtype
        known = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        require(found in known, f"'{self.path}': {name} is {found}, want float32, bfloat16 or float16")
        return known[found]

    def read(self, name):
        tensor = self.tensors[name].detach().contiguous()
        if tensor.dtype == self.torch.bfloat16:  # numpy knows no BF16: the same bits under another type
            return tensor.view(self.torch.int16).numpy().view(llmc_model.bfloat16)
        return tensor.numpy()


def open_weights(folder):
    torch_file = os.path.join(folder, "pytorch_model.bin")
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if os.path.isfile(os.path.join(folder, name)):
            return SafetensorsWeights(folder)
    if os.path.isfile(torch_file):
        return TorchWeights(torch_file)
    raise ModelError(
        f"'{folder}' has no weights: want model.safetensors, model.safetensors.index.json or pytorch_model.bin"
    )


# ----------------------------------------------------------------------------------------------------------------------
# the two together


def match(weights, shape, folder):
    """{short name: name in the file}, after checking that every tensor of the model is there, in its size and in a type
    that can be read, and nothing else is."""
    found = {}
    for name in weights.names():
        short = name.removeprefix("transformer.")
        if MASK_NAME.fullmatch(short):
            continue
        require(short not in found, f"'{folder}' has both {found.get(short)} and {name}")
        found[short] = name
    wanted = {}
    for tensor in shape.tensors():
        size = (shape.vocab_size, shape.channels) if tensor.name == "wte" else tensor.size
        for layer in range(tensor.layers):
            wanted[tensor.their_name.format(layer)] = size[::-1] if tensor.is_linear else size
    for short, size in wanted.items():
        require(short in found, f"'{folder}' has no {short}")
        have = weights.size(found[short])
        require(have == size, f"'{folder}': {found[short]} is {have}, want {size} by config.json")
        weights.dtype(found[short])
    extra = sorted(set(found) - set(wanted) - {"lm_head.weight"})
    require(
        not extra,
        f"'{folder}' has tensors that the model has no place for: {', '.join(extra[:3])}"
        + (f" and {len(extra) - 3} more" if len(extra) > 3 else ""),
    )
    return found


def check_head(weights, found, config, folder):
    """The LM head must be the token embedding: tied and not stored, or stored and equal."""
    head = found.pop("lm_head.weight", None)
    if head is None:
        tied = config.get("tie_word_embeddings", True)
        require(tied is True, f"'{folder}': tie_word_embeddings is {tied!r}, want true: the LM head is the embedding")
        return
    np = llmc_model.np
    weights.dtype(head)
    embedding = weights.read(found["wte.weight"])
    same = weights.size(head) == embedding.shape and np.array_equal(
        weights.read(head).astype(np.float32), embedding.astype(np.float32), equal_nan=True
    )
    require(same, f"'{folder}': lm_head.weight is not wte.weight: the model has no LM head of its own (untied)")


def write(path, weights, found, shape, dtype):
    np = llmc_model.np
    padding = np.zeros((shape.padded_vocab_size - shape.vocab_size, shape.channels), llmc_model.dtype_of(dtype))

    def layer_of(tensor, layer):
        name = found[tensor.their_name.format(layer)]
        values = llmc_model.converted(weights.read(name), dtype, name)
        if tensor.name == "wte":
            return np.concatenate([values, padding])
        return values.T if tensor.is_linear else values

    llmc_model.write_model_file(path, shape, dtype, layer_of)


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s HF_DIR OUT.bin [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", metavar="HF_DIR", help="folder with config.json and the weights")
    parser.add_argument("model", metavar="OUT.bin", help="model file to write")
    parser.add_argument(
        "--dtype", choices=["bf16", "fp32"], help="type of the weights; not given: bf16 if all are, else fp32"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT.bin if it is there")
    return parser.parse_args(argv)


def import_model(argv):
    arguments = parse_arguments(argv)
    folder, out = arguments.folder, arguments.model
    require(os.path.isdir(folder), f"'{folder}' is no folder: want one with config.json and the weights")
    if os.path.lexists(out):
        require(os.path.isfile(out), f"cannot write '{out}': it exists and is no file")
        require(arguments.force, f"'{out}' exists: --force replaces it")
    path = os.path.join(folder, "config.json")
    config = llmc_model.read_json(path)
    shape = shape_of(config, path)
    weights = open_weights(folder)
    found = match(weights, shape, folder)
    check_head(weights, found, config, folder)
    dtype = arguments.dtype or ("bf16" if {weights.dtype(name) for name in found.values()} == {"bf16"} else "fp32")
    write(out, weights, found, shape, dtype)
    print(
        f"{out}: {shape.num_layers} layers, {shape.channels} channels, {shape.num_heads} heads, vocabulary "
        f"{shape.vocab_size}, {shape.max_seq_len} positions, {shape.num_parameters()} parameters, {dtype}"
    )


def main(argv):
    return llmc_model.run(import_model, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
