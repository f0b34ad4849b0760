#!/usr/bin/env python3
"""Turn a model of train_gpt_fp8 or llm.c into a folder that Hugging Face's transformers loads (GPT2LMHeadModel).

    scripts/export_hf.py runs/124M/model.bin hf/124M --tokenizer vocabulary
    scripts/export_hf.py runs/124M/step_00020000 hf/124M          a checkpoint's folder: the model.bin in it
    python3 -c 'import transformers; print(transformers.pipeline("text-generation", "hf/124M")("Once"))'

MODEL is an llm.c model file, version 5 (BF16) or 3 (FP32): what --save-model and llm.c write. OUT_DIR gets
config.json, generation_config.json, model.safetensors (more than one above --shard-gb) and, with --tokenizer, the
tokenizer's files. It appears under its name only when all of it is on disk. The numbers stay as they are unless --dtype
asks for another type; the padding rows of the vocabulary are left out; the LM head is the token embedding, as it was.

Needs the Python packages numpy, safetensors and ml_dtypes. Exit status: 0 written; 1 not, and why; 2 wrong arguments.
"""

import argparse
import functools
import json
import math
import os
import shutil
import sys

import llmc_model
from llmc_model import ModelError, require

BYTE_VOCABULARY = 257  # ids 0..255 are bytes, 256 is end-of-text (lib/tokens.h)
END_OF_TEXT = "<|endoftext|>"


# ----------------------------------------------------------------------------------------------------------------------
# the tokenizer


def printable_bytes():
    """GPT-2's character for every byte: itself where it prints, else the next free one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return [characters[byte] for byte in range(256)]


def write_json(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=2)
        file.write("\n")


def check_tokenizer(tokenizer, shape):
    """The vocabulary {token: id} of --tokenizer: "byte", or a folder with vocab.bpe and encoder.json."""
    if tokenizer == "byte":
        require(
            shape.vocab_size == BYTE_VOCABULARY,
            f"--tokenizer byte: the model's vocabulary is {shape.vocab_size}, that of bytes {BYTE_VOCABULARY}",
        )
        vocabulary = {character: byte for byte, character in enumerate(printable_bytes())}
        vocabulary[END_OF_TEXT] = 256
        return vocabulary
    for name in ("encoder.json", "vocab.bpe"):
        require(os.path.isfile(os.path.join(tokenizer, name)), f"--tokenizer '{tokenizer}': no {name} in it")
    path = os.path.join(tokenizer, "encoder.json")
    vocabulary = llmc_model.read_json(path)
    require(END_OF_TEXT in vocabulary, f"'{path}' has no {END_OF_TEXT}")
    for token, index in vocabulary.items():
        require(
            type(index) is int and 0 <= index < shape.vocab_size,
            f"'{path}': token {token!r} has id {index!r}, want 0 to {shape.vocab_size - 1}, the model's vocabulary",
        )
    return vocabulary


def write_tokenizer(folder, tokenizer, vocabulary, shape):
    if tokenizer == "byte":
        with open(os.path.join(folder, "vocab.json"), "w", encoding="utf-8") as file:
            json.dump(vocabulary, file)
        with open(os.path.join(folder, "merges.txt"), "w", encoding="utf-8") as file:
            file.write("#version: 0.2\n")
    else:  # OpenAI's files under transformers' names
        shutil.copyfile(os.path.join(tokenizer, "encoder.json"), os.path.join(folder, "vocab.json"))
        shutil.copyfile(os.path.join(tokenizer, "vocab.bpe"), os.path.join(folder, "merges.txt"))
    special = {name: END_OF_TEXT for name in ("bos_token", "eos_token", "unk_token")}
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": shape.max_seq_len, "add_prefix_space": False}
    write_json(os.path.join(folder, "tokenizer_config.json"), {**settings, **special})


# ----------------------------------------------------------------------------------------------------------------------
# configuration and weights


def configuration(shape, dtype, end_of_text):
    """config.json, in GPT2Config's names. Neither program has dropout."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": shape.vocab_size,
        "n_positions": shape.max_seq_len,
        "n_ctx": shape.max_seq_len,
        "n_embd": shape.channels,
        "n_layer": shape.num_layers,
        "n_head": shape.num_heads,
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": llmc_model.LAYER_NORM_EPSILON,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "tie_word_embeddings": True,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
        "torch_dtype": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
    }


def their_tensors(model, dtype):
    """[(name, bytes, a function that reads it)] of all tensors in Hugging Face's names, sizes and order."""

    def values(tensor, layer):
        found = model.read(tensor, layer)
        found = found.T if tensor.is_linear else found[: model.shape.vocab_size] if tensor.name == "wte" else found
        return llmc_model.np.ascontiguousarray(llmc_model.converted(found, dtype, tensor.name))

    tensors = []
    for tensor in model.shape.tensors():
        rows = model.shape.vocab_size if tensor.name == "wte" else tensor.size[0]
        size = math.prod((rows, *tensor.size[1:])) * llmc_model.dtype_of(dtype).itemsize
        for layer in range(tensor.layers):
            name = "transformer." + tensor.their_name.format(layer)
            tensors.append((name, size, functools.partial(values, tensor, layer)))
    return tensors


def write_weights(folder, tensors, shard_bytes):
    """model.safetensors, or shards of at most shard_bytes (one tensor at least) and their index. Returns the number of
    files. One file's tensors are in memory at a time."""
    shards = [[]]
    filled = 0
    for tensor in tensors:
        if filled + tensor[1] > shard_bytes and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor[1]
    places = {}
    for i, shard in enumerate(shards):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        places.update({name: file for name, _, _ in shard})
        arrays = {name: values() for name, _, values in shard}
        try:
            llmc_model.save_file(arrays, os.path.join(folder, file), metadata={"format": "pt"})
            # the library makes it readable for its owner alone
            os.chmod(os.path.join(folder, file), os.stat(os.path.join(folder, "config.json")).st_mode)
        except llmc_model.SafetensorError as error:
            raise ModelError(f"cannot write '{file}' for '{folder}': {' '.join(str(error).split())}") from error
    if len(shards) > 1:
        total = {"total_size": sum(size for _, size, _ in tensors)}
        write_json(os.path.join(folder, "model.safetensors.index.json"), {"metadata": total, "weight_map": places})
    return len(shards)


# ----------------------------------------------------------------------------------------------------------------------


def parse_arguments(argv):
    parser = argparse.ArgumentParser(
        usage="%(prog)s MODEL OUT_DIR [options]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="llm.c model file, or a checkpoint's folder step_*")
    parser.add_argument("folder", metavar="OUT_DIR", help="folder to make")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], help="type of the weights; not given: MODEL's")
    parser.add_argument(
        "--tokenizer", metavar="DIR|byte", help="add the tokenizer: folder with vocab.bpe and encoder.json, or byte"
    )
    parser.add_argument("--force", action="store_true", help="replace OUT_DIR if it is an earlier export")
    parser.add_argument(
        "--shard-gb", type=float, default=5.0, metavar="N", help="split the weights into files of at most N GB (5)"
    )
    arguments = parser.parse_args(argv)
    if not arguments.shard_gb > 0:
        parser.error(f"--shard-gb {arguments.shard_gb}, want a number above 0")
    return arguments


def export(argv):
    arguments = parse_arguments(argv)
    source, out = arguments.model, arguments.folder.rstrip("/") or "/"
    if os.path.isdir(source):
        path = os.path.join(source, "model.bin")
        require(
            os.path.isfile(path),
            f"'{source}' has no model.bin: want a model file, or the folder step_* of a checkpoint",
        )
        source = path
    with llmc_model.ModelFile(source) as model:
        shape, dtype = model.shape, arguments.dtype or model.dtype
        end_of_text = shape.vocab_size - 1  # as train_gpt_fp8 takes it where no vocabulary says otherwise
        if arguments.tokenizer is not None:
            vocabulary = check_tokenizer(arguments.tokenizer, shape)
            end_of_text = vocabulary[END_OF_TEXT]
        with llmc_model.new_folder(out, arguments.force) as folder:
            write_json(os.path.join(folder, "config.json"), configuration(shape, dtype, end_of_text))
            generation = {"bos_token_id": end_of_text, "eos_token_id": end_of_text}
            write_json(os.path.join(folder, "generation_config.json"), generation)
            if arguments.tokenizer is not None:
                write_tokenizer(folder, arguments.tokenizer, vocabulary, shape)
            files = write_weights(folder, their_tensors(model, dtype), arguments.shard_gb * 1e9)
    print(
        f"{out}: GPT2LMHeadModel, {shape.num_layers} layers, {shape.channels} channels, {shape.num_heads} heads, "
        f"vocabulary {shape.vocab_size}, {shape.max_seq_len} positions, {dtype}, {files} weight file{'s' * (files > 1)}"
    )


def main(argv):
    return llmc_model.run(export, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
