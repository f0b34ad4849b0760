#!/usr/bin/env python3
"""Tests of export_hf.py and import_hf.py: numbers against an own GPT-2 in FP64, against PyTorch's logits of an llm.c
model, against transformers and against train_gpt_fp8_cpu; round trips; what they refuse; kills and full disks.

Needs numpy, safetensors and ml_dtypes (scripts/setup.sh --what test puts them into .deps/python). What compares with
transformers runs where torch and transformers are installed: they are too big to be fetched for a test.
"""

import contextlib
import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
DEPENDENCIES = os.path.join(HERE, "..", ".deps", "python")
PROGRAM = os.path.join(HERE, "..", "train_gpt_fp8_cpu")
SHARED = os.path.join(HERE, "..", "..", "shared", "data")
sys.path.insert(0, HERE)
sys.path.append(DEPENDENCIES)
import export_hf  # noqa: E402  (its folder must be on the path first)
import import_hf  # noqa: E402
import llmc_model  # noqa: E402

if llmc_model.MISSING_PACKAGE is None:
    import numpy as np
    from ml_dtypes import bfloat16
    from safetensors.numpy import load_file, save_file

SMALL = {"T": 32, "V": 300, "L": 2, "NH": 2, "C": 32}  # Vp = 384


class Skipped(Exception):
    """The test cannot run here; the text is the reason."""


def need_numpy():
    if llmc_model.MISSING_PACKAGE is not None:
        raise Skipped(llmc_model.MISSING_PACKAGE)


def need_transformers():
    need_numpy()
    try:
        import torch
        import transformers
    except ImportError as error:
        raise Skipped(f"{str(error).splitlines()[0]} (pip install torch transformers)") from error
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # or it warns when a process is started after its use
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(2)
    return torch, transformers


def shared(path):
    need_numpy()
    if not os.path.exists(os.path.join(SHARED, path)):
        raise Skipped(f"no ../shared/data/{path}")
    return os.path.join(SHARED, path)


def run_main(program, *arguments):
    """(exit status, stdout, stderr) of a program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = program.main([str(a) for a in arguments])
        except SystemExit as stop:
            status = stop.code
    return status, out.getvalue(), err.getvalue()


def done(program, *arguments):
    status, out, err = run_main(program, *arguments)
    assert status == 0 and err == "" and out.count("\n") == 1, (status, out, err)


def refused(text, program, source, out, *arguments):
    """One error line with `text`, status 1, and nothing left beside what was there before."""
    before = sorted(os.listdir(os.path.dirname(out)))
    status, output, err = run_main(program, source, out, *arguments)
    assert status == 1, f"exit status {status}, want 1: {output}"
    assert err.startswith("error: ") and err.count("\n") == 1 and output == "", f"want one error line, got {err!r}"
    assert text in err, f"want {text!r} in {err!r}"
    assert sorted(os.listdir(os.path.dirname(out))) == before, os.listdir(os.path.dirname(out))


def contents(folder):
    found = {}
    for name in os.listdir(folder):
        with open(os.path.join(folder, name), "rb") as file:
            found[name] = file.read()
    return found


def read_bytes(path):
    with open(path, "rb") as file:
        return file.read()


# ----------------------------------------------------------------------------------------------------------------------
# model files, folders and GPT-2, written down a second time


def file_tensors(T, V, L, NH, C):
    """Names and sizes of a model file's tensors, all layers in one, as llm.c documents them."""
    Vp = math.ceil(V / 128) * 128
    return {
        "wte": (Vp, C), "wpe": (T, C), "ln1w": (L, C), "ln1b": (L, C), "qkvw": (L, 3 * C, C), "qkvb": (L, 3 * C),
        "attprojw": (L, C, C), "attprojb": (L, C), "ln2w": (L, C), "ln2b": (L, C), "fcw": (L, 4 * C, C),
        "fcb": (L, 4 * C), "fcprojw": (L, C, 4 * C), "fcprojb": (L, C), "lnfw": (C,), "lnfb": (C,),
    }  # fmt: skip


def random_model(path, version, seed=1, **changes):
    """A model file of random numbers, large enough that every tensor shows in the logits. Returns its sizes."""
    sizes = {**SMALL, **changes}
    random = np.random.default_rng(seed)
    header = np.zeros(256, "<i4")
    Vp = math.ceil(sizes["V"] / 128) * 128
    header[:8] = [20240326, version, sizes["T"], sizes["V"], sizes["L"], sizes["NH"], sizes["C"], Vp]
    with open(path, "wb") as file:
        file.write(header.tobytes())
        for name, size in file_tensors(**sizes).items():
            values = random.normal(0, 0.3 if len(size) > 1 else 0.5, size) + (name in ("ln1w", "ln2w", "lnfw"))
            if name == "wte":
                values[sizes["V"] :] = 0
            file.write(values.astype("<f4" if version == 3 else bfloat16).tobytes())
    return sizes


def read_model(path):
    """(weights in FP64, sizes) of a model file; linear layers are (out, in)."""
    raw = read_bytes(path)
    header = np.frombuffer(raw, "<i4", 256)
    sizes = dict(zip(("T", "V", "L", "NH", "C"), map(int, header[2:7])))
    weights, at = {}, 1024
    for name, size in file_tensors(**sizes).items():
        count = math.prod(size)
        if header[1] == 5:  # BF16 is the upper half of FP32
            values = (np.frombuffer(raw, "<u2", count, at).astype("<u4") << 16).view("<f4")
        else:
            values = np.frombuffer(raw, "<f4", count, at)
        at += count * (2 if header[1] == 5 else 4)
        weights[name] = values.astype(np.float64).reshape(size)
    assert at == len(raw)
    return weights, sizes


THEIR_NAMES = {
    "ln1w": "ln_1.weight", "ln1b": "ln_1.bias", "qkvw": "attn.c_attn.weight", "qkvb": "attn.c_attn.bias",
    "attprojw": "attn.c_proj.weight", "attprojb": "attn.c_proj.bias", "ln2w": "ln_2.weight", "ln2b": "ln_2.bias",
    "fcw": "mlp.c_fc.weight", "fcb": "mlp.c_fc.bias", "fcprojw": "mlp.c_proj.weight", "fcprojb": "mlp.c_proj.bias",
}  # fmt: skip


def read_folder(folder):
    """(weights in FP64 as read_model has them, config) of an exported folder: Conv1D's matrices turned back."""
    with open(os.path.join(folder, "config.json"), encoding="utf-8") as file:
        config = json.load(file)
    tensors = {}
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            tensors.update(load_file(os.path.join(folder, name)))
    tensors = {name.removeprefix("transformer."): values.astype(np.float64) for name, values in tensors.items()}
    weights = {"wte": tensors.pop("wte.weight"), "wpe": tensors.pop("wpe.weight")}
    weights.update({"lnfw": tensors.pop("ln_f.weight"), "lnfb": tensors.pop("ln_f.bias")})
    for name, theirs in THEIR_NAMES.items():
        layers = [tensors.pop(f"h.{layer}.{theirs}") for layer in range(config["n_layer"])]
        weights[name] = np.stack([w.T if w.ndim == 2 else w for w in layers])
    assert not tensors, list(tensors)
    return weights, config


def write_folder(folder, prefix="transformer.", dtype="float32", seed=2, settings=(), change=None, **changes):
    """A GPT2LMHeadModel folder of random weights, made without export_hf.py. change(tensors) may spoil them. Returns
    its weights in FP64 as read_model has them, and sizes."""
    sizes = {**SMALL, **changes}
    random = np.random.default_rng(seed)
    kind = bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    weights, tensors = {}, {}
    for name, size in file_tensors(**sizes).items():
        size = (sizes["V"], sizes["C"]) if name == "wte" else size
        values = random.normal(0, 0.3 if len(size) > 1 else 0.5, size) + (name in ("ln1w", "ln2w", "lnfw"))
        values = values.astype(kind)
        weights[name] = values.astype(np.float64)
        if name in THEIR_NAMES:
            for layer in range(sizes["L"]):
                value = values[layer].T if values[layer].ndim == 2 else values[layer]
                tensors[f"{prefix}h.{layer}.{THEIR_NAMES[name]}"] = np.ascontiguousarray(value)
        else:
            theirs = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}[name]
            tensors[prefix + theirs] = values
    os.makedirs(folder)
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": sizes["L"], "n_head": sizes["NH"],
              "n_embd": sizes["C"], "n_positions": sizes["T"], "vocab_size": sizes["V"]}  # fmt: skip
    config.update(settings)
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump({name: value for name, value in config.items() if value != "leave out"}, file)
    if change is not None:
        change(tensors)
    save_file(tensors, f"{folder}/model.safetensors")
    return weights, sizes


def layernorm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def logits_of(w, heads, tokens):
    """GPT-2 in FP64: logits (B, T, V or Vp) of tokens (B, T); linear layers are (out, in)."""
    (B, T), C = tokens.shape, w["wpe"].shape[1]
    HS = C // heads
    x = w["wte"][tokens] + w["wpe"][:T]
    future = np.triu(np.full((T, T), -np.inf), 1)
    for layer in range(len(w["qkvw"])):
        normed = layernorm(x, w["ln1w"][layer], w["ln1b"][layer])
        qkv = normed @ w["qkvw"][layer].T + w["qkvb"][layer]
        q, k, v = (part.reshape(B, T, heads, HS).transpose(0, 2, 1, 3) for part in np.split(qkv, 3, axis=-1))
        scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(HS) + future
        probabilities = np.exp(scores - scores.max(-1, keepdims=True))
        probabilities /= probabilities.sum(-1, keepdims=True)
        attention = (probabilities @ v).transpose(0, 2, 1, 3).reshape(B, T, C)
        x = x + attention @ w["attprojw"][layer].T + w["attprojb"][layer]
        normed = layernorm(x, w["ln2w"][layer], w["ln2b"][layer])
        up = normed @ w["fcw"][layer].T + w["fcb"][layer]
        up = 0.5 * up * (1 + np.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + up @ w["fcprojw"][layer].T + w["fcprojb"][layer]
    return layernorm(x, w["lnfw"], w["lnfb"]) @ w["wte"].T


def losses_of(logits, targets):
    """Cross entropy (B, T) of logits (B, T, V)."""
    top = logits.max(-1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    return log_sum - np.take_along_axis(logits, targets[..., None], -1)[..., 0]


def write_tokens(path, tokens, vocabulary):
    header = np.zeros(256, "<i4")
    header[:4] = [20240520, 1, len(tokens), vocabulary]
    with open(path, "wb") as file:
        file.write(header.tobytes() + tokens.astype("<u2").tobytes())


def program_loss(tmp, model, tokens, vocabulary, *flags, precision="fp32"):
    """Validation loss that train_gpt_fp8_cpu finds for a model file: the first batch of 4 x 32 tokens."""
    if not os.path.exists(PROGRAM):
        raise Skipped("no train_gpt_fp8_cpu (make cpu)")
    write_tokens(f"{tmp}/tokens.bin", tokens, vocabulary)
    command = [PROGRAM, "-e", model, "-i", f"{tmp}/tokens.bin", "-j", f"{tmp}/tokens.bin", "-o", f"{tmp}/log",
               "-x", "0", "-b", "4", "-t", "32", "-m", "1", "-v", "1", "-s", "0", "--precision", precision,
               *flags]  # fmt: skip
    shutil.rmtree(f"{tmp}/log", ignore_errors=True)
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    with open(f"{tmp}/log/metrics.jsonl", encoding="utf-8") as file:
        found = [record["loss"] for record in map(json.loads, file) if record["type"] == "val"]
    return found[-1]


def batch(vocabulary, seed=3):
    """(tokens of a file, inputs (4, 32), targets (4, 32))."""
    tokens = np.random.default_rng(seed).integers(0, vocabulary, 4 * 32 + 1)
    return tokens, tokens[:-1].reshape(4, 32), tokens[1:].reshape(4, 32)


def difference(found, want):
    """Largest error, relative to the largest value."""
    return float(np.abs(found - want).max() / np.abs(want).max())


# ----------------------------------------------------------------------------------------------------------------------
# numbers


def test_export_keeps_every_number(tmp):
    need_numpy()
    for version, dtype in ((3, "float32"), (5, "bfloat16")):
        for V in (300, 257, 384, 1):
            model, folder = f"{tmp}/{version}_{V}.bin", f"{tmp}/{version}_{V}"
            random_model(model, version, V=V)
            done(export_hf, model, folder)
            want, sizes = read_model(model)
            found, config = read_folder(folder)
            assert found["wte"].shape == (V, sizes["C"]), found["wte"].shape
            want["wte"] = want["wte"][:V]
            for name in want:
                assert np.array_equal(found[name], want[name]), (version, V, name)
            assert config["torch_dtype"] == dtype and config["vocab_size"] == V, config
            assert {str(t.dtype) for t in load_file(f"{folder}/model.safetensors").values()} == {dtype}
            names = ("n_layer", "n_head", "n_embd", "n_positions", "activation_function", "tie_word_embeddings")
            assert [config[name] for name in names] == [2, 2, 32, 32, "gelu_new", True], config
            assert config["bos_token_id"] == V - 1 and config["layer_norm_epsilon"] == 1e-5, config
            assert json.loads(contents(folder)["generation_config.json"])["eos_token_id"] == V - 1
            modes = {os.stat(f"{folder}/{name}").st_mode for name in os.listdir(folder)}
            assert len(modes) == 1, "the files are not equally readable"


def test_there_and_back_is_the_same_file(tmp):
    need_numpy()
    for version, V in ((3, 300), (5, 300), (5, 257), (5, 384), (5, 1)):
        model, folder, back = f"{tmp}/{version}_{V}.bin", f"{tmp}/{version}_{V}", f"{tmp}/{version}_{V}_back.bin"
        random_model(model, version, V=V, seed=V)
        done(export_hf, model, folder)
        done(import_hf, folder, back)
        assert read_bytes(back) == read_bytes(model), (version, V)


def test_types(tmp):
    """BF16 -> FP32 -> BF16 is exact; FP32 -> BF16 rounds to nearest even, in both programs."""
    need_numpy()
    random_model(f"{tmp}/5.bin", 5)
    done(export_hf, f"{tmp}/5.bin", f"{tmp}/wide", "--dtype", "fp32")
    done(import_hf, f"{tmp}/wide", f"{tmp}/wide.bin")
    assert read_bytes(f"{tmp}/wide.bin")[4:8] == b"\3\0\0\0"
    for name, values in read_model(f"{tmp}/wide.bin")[0].items():
        assert np.array_equal(values, read_model(f"{tmp}/5.bin")[0][name]), name
    done(import_hf, f"{tmp}/wide", f"{tmp}/narrow.bin", "--dtype", "bf16")
    assert read_bytes(f"{tmp}/narrow.bin") == read_bytes(f"{tmp}/5.bin")

    random_model(f"{tmp}/3.bin", 3)
    values = bytearray(read_bytes(f"{tmp}/3.bin"))
    edges = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x80000000, 0x00000001, 0x7F7F7FFF], "<u4")
    values[1024 : 1024 + edges.nbytes] = edges.tobytes()  # ties, to even both ways; their neighbours; the largest
    with open(f"{tmp}/3.bin", "wb") as file:
        file.write(values)
    bits = np.frombuffer(values, "<u4", offset=1024)
    want = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype("<u2")
    assert list(want[:7]) == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x8000, 0, 0x7F7F]
    done(export_hf, f"{tmp}/3.bin", f"{tmp}/rounded", "--dtype", "bf16")
    done(import_hf, f"{tmp}/rounded", f"{tmp}/rounded.bin")
    assert np.array_equal(np.frombuffer(read_bytes(f"{tmp}/rounded.bin"), "<u2", offset=1024), want)
    done(export_hf, f"{tmp}/3.bin", f"{tmp}/exact")
    done(import_hf, f"{tmp}/exact", f"{tmp}/rounded2.bin", "--dtype", "bf16")
    assert read_bytes(f"{tmp}/rounded2.bin") == read_bytes(f"{tmp}/rounded.bin")

    values[1024:1028] = np.array([0x7F7F8000], "<u4").tobytes()  # rounds to infinity
    with open(f"{tmp}/3.bin", "wb") as file:
        file.write(values)
    refused("1 values are too large for bf16", export_hf, f"{tmp}/3.bin", f"{tmp}/infinite", "--dtype", "bf16")
    done(export_hf, f"{tmp}/3.bin", f"{tmp}/large")
    refused("1 values are too large for bf16", import_hf, f"{tmp}/large", f"{tmp}/infinite.bin", "--dtype", "bf16")


def test_import_of_a_folder_by_other_hands(tmp):
    """Names with and without prefix, masks, a stored head, FP16, shards: the same numbers; types as they should be."""
    need_numpy()

    def masks(tensors):
        tensors["h.0.attn.bias"] = np.ones((1, 1, 32, 32), np.uint8)
        tensors["h.1.attn.masked_bias"] = np.array(-1e4, np.float32)

    def stored_head(tensors):
        tensors["lm_head.weight"] = tensors["transformer.wte.weight"].copy()

    cases = {
        "plain": ({}, 3),
        "no prefix": ({"prefix": "", "change": masks}, 3),
        "head": ({"change": stored_head, "settings": {"tie_word_embeddings": False}}, 3),
        "bf16": ({"dtype": "bfloat16"}, 5),
        "fp16": ({"dtype": "float16"}, 3),
        "defaults": ({"settings": {"architectures": "leave out", "n_inner": 128, "model_type": "leave out"}}, 3),
        "same gelu": ({"settings": {"activation_function": "gelu_pytorch_tanh"}}, 3),
        "large": ({"V": 384, "C": 64, "NH": 4, "L": 3, "T": 48}, 3),
    }
    for case, (how, version) in cases.items():
        want, sizes = write_folder(f"{tmp}/{case}", **how)
        done(import_hf, f"{tmp}/{case}", f"{tmp}/{case}.bin")
        found, found_sizes = read_model(f"{tmp}/{case}.bin")
        assert found_sizes == sizes and read_bytes(f"{tmp}/{case}.bin")[4] == version, (case, found_sizes)
        assert not found["wte"][sizes["V"] :].any(), case
        found["wte"] = found["wte"][: sizes["V"]]
        for name in want:
            assert np.array_equal(found[name], want[name]), (case, name)


def test_tokenizer_files(tmp):
    need_numpy()
    random_model(f"{tmp}/bytes.bin", 5, V=257)
    done(export_hf, f"{tmp}/bytes.bin", f"{tmp}/bytes", "--tokenizer", "byte")
    files = contents(f"{tmp}/bytes")
    vocabulary = json.loads(files["vocab.json"])
    assert sorted(vocabulary.values()) == list(range(257)) and len(files["merges.txt"].splitlines()) == 1
    ids = {0x00: "Ā", 0x0A: "Ċ", 0x20: "Ġ", 0x21: "!", 0x7E: "~", 0x7F: "ġ", 0xA0: "ł", 0xA1: "¡", 0xAC: "¬",
           0xAD: "Ń", 0xAE: "®", 0xFF: "ÿ", 256: "<|endoftext|>"}  # fmt: skip
    assert {index: vocabulary.get(token) for index, token in ids.items()} == {index: index for index in ids}, vocabulary
    os.makedirs(f"{tmp}/words")
    for name, text in (("encoder.json", '{"a": 0, "<|endoftext|>": 2, "b": 1}'), ("vocab.bpe", "#version: 0.2\na b\n")):
        with open(f"{tmp}/words/{name}", "w", encoding="utf-8") as file:
            file.write(text)
    done(export_hf, f"{tmp}/bytes.bin", f"{tmp}/out", "--tokenizer", f"{tmp}/words")
    files, words = contents(f"{tmp}/out"), contents(f"{tmp}/words")
    assert files["vocab.json"] == words["encoder.json"] and files["merges.txt"] == words["vocab.bpe"]
    assert json.loads(files["config.json"])["eos_token_id"] == 2
    assert json.loads(files["tokenizer_config.json"])["model_max_length"] == 32


def test_shards(tmp):
    need_numpy()
    random_model(f"{tmp}/a.bin", 5)
    done(export_hf, f"{tmp}/a.bin", f"{tmp}/a", "--shard-gb", "0.00002")
    index = json.loads(contents(f"{tmp}/a")["model.safetensors.index.json"])
    files = sorted(name for name in os.listdir(f"{tmp}/a") if name.endswith(".safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors", files
    assert set(index["weight_map"].values()) == set(files) and len(index["weight_map"]) == 4 + 12 * 2, index
    held = {name: file for file in files for name in load_file(f"{tmp}/a/{file}")}
    assert held == index["weight_map"]
    sizes = [sum(t.nbytes for t in load_file(f"{tmp}/a/{file}").values()) for file in files]
    assert sum(sizes) == index["metadata"]["total_size"], (sizes, index["metadata"])
    assert all(size <= 20000 or len(load_file(f"{tmp}/a/{f}")) == 1 for size, f in zip(sizes, files)), sizes
    done(import_hf, f"{tmp}/a", f"{tmp}/back.bin")
    assert read_bytes(f"{tmp}/back.bin") == read_bytes(f"{tmp}/a.bin")

    def broken_index(text, **changes):
        with open(f"{tmp}/a/model.safetensors.index.json", "w", encoding="utf-8") as file:
            json.dump({"weight_map": {**index["weight_map"], **changes}}, file)
        refused(text, import_hf, f"{tmp}/a", f"{tmp}/none.bin")

    broken_index("want a .safetensors file beside it", **{"transformer.wte.weight": "../a/" + files[0]})
    broken_index("want a .safetensors file beside it", **{"transformer.wte.weight": 7})
    broken_index("which is not there", **{"transformer.wte.weight": "model-x.safetensors"})
    broken_index("has no transformer.wte.weight", **{"transformer.wte.weight": files[-1]})
    with open(f"{tmp}/a/model.safetensors.index.json", "w", encoding="utf-8") as file:
        file.write('{"weight_map": []}')
    refused("has no weight_map", import_hf, f"{tmp}/a", f"{tmp}/none.bin")
    with open(f"{tmp}/a/model.safetensors.index.json", "w", encoding="utf-8") as file:
        json.dump(index, file)
    os.remove(f"{tmp}/a/{files[1]}")
    refused("which is not there", import_hf, f"{tmp}/a", f"{tmp}/none.bin")


def test_logits_of_an_llmc_model(tmp):
    """llm.c's d2 after 500 steps: FP64 logits and losses of the exported folder are PyTorch's."""
    model, reference = shared("llmc/d2_model_00000500.bin"), read_bytes(shared("reference/d2_reference.bin"))
    done(export_hf, model, f"{tmp}/d2")
    B, T, V = (int(n) for n in np.frombuffer(reference, "<i4", 5)[2:5])
    rows = int(np.frombuffer(reference, "<i4", 12)[10])
    at = 1024
    tokens = np.frombuffer(reference, "<i4", B * T + 1, at)
    at += 4 * (B * T + 1)
    which = np.frombuffer(reference, "<i4", rows, at)
    at += 4 * rows
    want_logits = np.frombuffer(reference, "<f4", rows * V, at).reshape(rows, V)
    want_losses = np.frombuffer(reference, "<f4", B * T, at + 4 * rows * V)
    weights, config = read_folder(f"{tmp}/d2")
    logits = logits_of(weights, config["n_head"], tokens[:-1].reshape(B, T))
    assert logits.shape == (B, T, V)
    # the reference is FP64, stored as FP32: 2^-24 relative
    assert difference(logits.reshape(B * T, V)[which], want_logits) < 1e-7
    assert difference(losses_of(logits, tokens[1:].reshape(B, T)).reshape(-1), want_losses) < 1e-7
    done(import_hf, f"{tmp}/d2", f"{tmp}/back.bin")
    assert read_bytes(f"{tmp}/back.bin") == read_bytes(model)


def test_loss_of_our_program(tmp):
    """A folder made by others, imported: train_gpt_fp8_cpu finds its loss. Its model, exported: the same loss again."""
    need_numpy()
    weights, sizes = write_folder(f"{tmp}/theirs", V=300, C=64, NH=4)
    tokens, inputs, targets = batch(300)
    want = losses_of(logits_of(weights, sizes["NH"], inputs), targets).mean()
    done(import_hf, f"{tmp}/theirs", f"{tmp}/theirs.bin")
    found = program_loss(tmp, f"{tmp}/theirs.bin", tokens, 300, "--save-model", f"{tmp}/ours.bin")
    assert abs(found / want - 1) < 1e-5, (found, want)
    done(export_hf, f"{tmp}/ours.bin", f"{tmp}/ours")  # BF16, so other weights than before: by 2^-9
    weights, config = read_folder(f"{tmp}/ours")
    want = losses_of(logits_of(weights, config["n_head"], inputs), targets).mean()
    found = program_loss(tmp, f"{tmp}/ours.bin", tokens, 300)
    assert abs(found / want - 1) < 1e-5, (found, want)


# ----------------------------------------------------------------------------------------------------------------------
# transformers


def their_logits(torch, model, tokens):
    with torch.no_grad():
        return model(torch.tensor(tokens.astype(np.int64))).logits


def test_transformers_logits(tmp):
    """Random models of both versions, exported: nothing missing, nothing too much, the logits are the FP64 ones."""
    torch, transformers = need_transformers()
    _, inputs, _ = batch(300)
    for version, kind in ((3, torch.float32), (5, torch.bfloat16)):
        sizes = random_model(f"{tmp}/{version}.bin", version, C=64, NH=4, L=3)
        want = logits_of(read_model(f"{tmp}/{version}.bin")[0], sizes["NH"], inputs)[..., : sizes["V"]]
        for shard in ("5", "0.00005"):
            folder = f"{tmp}/{version}_{shard}"
            done(export_hf, f"{tmp}/{version}.bin", folder, "--shard-gb", shard)
            model, loading = transformers.GPT2LMHeadModel.from_pretrained(
                folder, torch_dtype=torch.float32, output_loading_info=True
            )
            assert not any(loading.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
            found = their_logits(torch, model.eval(), inputs)
            assert difference(found.numpy(), want) < 2e-6, difference(found.numpy(), want)
        # the type of the weights is the folder's; in BF16 each of the 15 ops in a row of 3 blocks rounds by up to 2^-9
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, torch_dtype="auto")
        assert type(model) is transformers.GPT2LMHeadModel and model.dtype == kind, (type(model), model.dtype)
        found = their_logits(torch, model.eval(), inputs).float().numpy()
        assert difference(found, want) < (2e-6 if version == 3 else 45 * 2**-9), difference(found, want)
        assert model.generation_config.eos_token_id == sizes["V"] - 1


def test_transformers_on_an_llmc_model(tmp):
    torch, transformers = need_transformers()
    reference = read_bytes(shared("reference/d2_reference.bin"))
    done(export_hf, shared("llmc/d2_model_00000500.bin"), f"{tmp}/d2")
    tokens = np.frombuffer(reference, "<i4", 257, 1024)
    rows = np.frombuffer(reference, "<i4", 8, 1024 + 4 * 257)
    want = np.frombuffer(reference, "<f4", 8 * 50257, 1024 + 4 * (257 + 8)).reshape(8, 50257)
    model = transformers.GPT2LMHeadModel.from_pretrained(f"{tmp}/d2", torch_dtype=torch.float32).eval()
    found = their_logits(torch, model, tokens[:-1].reshape(4, 64)).reshape(256, 50257).numpy()[rows]
    assert difference(found, want) < 2e-6, difference(found, want)
    model = transformers.GPT2LMHeadModel.from_pretrained(f"{tmp}/d2", torch_dtype="auto").eval()
    found = their_logits(torch, model, tokens[:-1].reshape(4, 64)).float().reshape(256, 50257).numpy()[rows]
    assert model.dtype == torch.bfloat16 and difference(found, want) < 2**-6, difference(found, want)


class Intruder:
    """A pickle that makes a folder when it is loaded by a reader that runs what it finds."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_transformers_models_in_our_program(tmp):
    """A model that transformers made, saved in each of its ways, imported: our loss is its cross entropy."""
    torch, transformers = need_transformers()
    tokens, inputs, targets = batch(300)
    torch.manual_seed(7)
    config = transformers.GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=3, n_head=4, n_inner=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases are 0 and weights tiny in a fresh model: nothing would show
            parameter.add_(torch.randn_like(parameter) * 0.2)
    logits = their_logits(torch, model, inputs).reshape(-1, 300)
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(targets).reshape(-1)).item()
    model.save_pretrained(f"{tmp}/whole")
    model.save_pretrained(f"{tmp}/shards", max_shard_size="100KB")
    assert os.path.exists(f"{tmp}/shards/model.safetensors.index.json")
    os.makedirs(f"{tmp}/torch")
    shutil.copy(f"{tmp}/whole/config.json", f"{tmp}/torch")
    torch.save(model.state_dict(), f"{tmp}/torch/pytorch_model.bin")  # with lm_head.weight
    for folder in ("whole", "shards", "torch"):
        done(import_hf, f"{tmp}/{folder}", f"{tmp}/{folder}.bin")
        assert read_bytes(f"{tmp}/{folder}.bin") == read_bytes(f"{tmp}/whole.bin"), folder
    model.bfloat16().save_pretrained(f"{tmp}/bf16")
    done(import_hf, f"{tmp}/bf16", f"{tmp}/bf16.bin")
    assert read_bytes(f"{tmp}/bf16.bin")[4] == 5
    torch.save(model.state_dict(), f"{tmp}/torch/pytorch_model.bin")
    done(import_hf, f"{tmp}/torch", f"{tmp}/torch_bf16.bin")
    assert read_bytes(f"{tmp}/torch_bf16.bin") == read_bytes(f"{tmp}/bf16.bin")

    for content in ({"wte.weight": [1, 2]}, [1, 2], {"wte.weight": transformers.GPT2Config()}):
        torch.save(content, f"{tmp}/torch/pytorch_model.bin")
        refused("pytorch_model.bin' ", import_hf, f"{tmp}/torch", f"{tmp}/none.bin")
    torch.save(Intruder(f"{tmp}/broken in"), f"{tmp}/torch/pytorch_model.bin")
    refused("is no file of PyTorch weights", import_hf, f"{tmp}/torch", f"{tmp}/none.bin")
    assert not os.path.exists(f"{tmp}/broken in")
    with open(f"{tmp}/torch/pytorch_model.bin", "wb") as file:
        file.write(b"not a pickle")
    refused("is no file of PyTorch weights", import_hf, f"{tmp}/torch", f"{tmp}/none.bin")

    found = program_loss(tmp, f"{tmp}/whole.bin", tokens, 300)
    assert abs(found / want - 1) < 1e-5, (found, want)
    # the weights rounded to BF16, ours and transformers', computed with in FP32
    rounded = transformers.GPT2LMHeadModel.from_pretrained(f"{tmp}/bf16", torch_dtype=torch.float32).eval()
    logits = their_logits(torch, rounded, inputs).reshape(-1, 300)
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(targets).reshape(-1)).item()
    found = program_loss(tmp, f"{tmp}/bf16.bin", tokens, 300)
    assert abs(found / want - 1) < 1e-5, (found, want)
    # and in BF16: the mean loss of 128 tokens, each logit off by up to 2^-8
    found = program_loss(tmp, f"{tmp}/bf16.bin", tokens, 300, precision="bf16")
    assert abs(found / want - 1) < 2**-8, (found, want)


def test_transformers_tokenizer(tmp):
    _, transformers = need_transformers()
    vectors = shared("tokenizer/test_vectors.jsonl")
    random_model(f"{tmp}/gpt2.bin", 5, V=50257, C=16, NH=1, L=1)
    done(export_hf, f"{tmp}/gpt2.bin", f"{tmp}/gpt2", "--tokenizer", os.path.dirname(vectors))
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{tmp}/gpt2")
    with open(vectors, encoding="utf-8") as file:
        for line in file:
            vector = json.loads(line)
            text, ids = vector["text"], vector["ids"]
            if "<|endoftext|>" not in text:
                assert tokenizer(text)["input_ids"] == ids, vector
    assert tokenizer.eos_token_id == 50256 and tokenizer.decode([31373, 995]) == "hello world"
    random_model(f"{tmp}/bytes.bin", 5, V=257)
    done(export_hf, f"{tmp}/bytes.bin", f"{tmp}/bytes", "--tokenizer", "byte")
    tokenizer = transformers.AutoTokenizer.from_pretrained(f"{tmp}/bytes")
    text = "Dr. Ä\n\t 日本 ~\x7f\xa0\xad"
    assert tokenizer(text)["input_ids"] == list(text.encode()), tokenizer(text)
    assert tokenizer.eos_token_id == 256 and tokenizer.decode(list(text.encode())) == text


# ----------------------------------------------------------------------------------------------------------------------
# what is refused, and what is left behind


def test_export_refuses(tmp):
    need_numpy()
    random_model(f"{tmp}/good.bin", 5)
    good = read_bytes(f"{tmp}/good.bin")

    def spoiled(text, content, *arguments):
        with open(f"{tmp}/bad.bin", "wb") as file:
            file.write(content)
        refused(text, export_hf, f"{tmp}/bad.bin", f"{tmp}/out", *arguments)

    def word(index, value):
        return good[: 4 * index] + int(value).to_bytes(4, "little", signed=True) + good[4 * index + 4 :]

    spoiled("0 bytes, want a header of 1024", b"")
    spoiled("500 bytes, want a header of 1024", good[:500])
    spoiled("is damaged: 1024 bytes", good[:1024])
    spoiled(f"is damaged: {len(good) - 1} bytes, want {len(good)}", good[:-1])
    spoiled(f"is damaged: {len(good) + 1} bytes, want {len(good)}", good + b"x")
    spoiled("first word 1, want 20240326", word(0, 1))
    spoiled("version 4, want 5 (BF16) or 3 (FP32)", word(1, 4))
    spoiled("is damaged", word(1, 3))
    spoiled("-5 positions", word(2, -5))
    spoiled("vocabulary of 70000", word(3, 70000))
    spoiled("0 layers", word(4, 0))
    spoiled("do not divide into 3 heads", word(5, 3))
    spoiled("40 channels, want a multiple of 16", word(6, 40))
    spoiled("padded vocabulary of 300, want 384", word(7, 300))
    refused("No such file", export_hf, f"{tmp}/none.bin", f"{tmp}/out")
    os.makedirs(f"{tmp}/step_00000020")
    refused("has no model.bin", export_hf, f"{tmp}/step_00000020", f"{tmp}/out")
    status, _, err = run_main(export_hf, f"{tmp}/good.bin", f"{tmp}/no/such/out")
    assert status == 1 and err.startswith("error: ") and err.count("\n") == 1 and "No such file" in err, err

    shutil.copy(f"{tmp}/good.bin", f"{tmp}/step_00000020/model.bin")  # a checkpoint's folder
    done(export_hf, f"{tmp}/step_00000020", f"{tmp}/a")
    done(export_hf, f"{tmp}/good.bin", f"{tmp}/b/")
    assert contents(f"{tmp}/a") == contents(f"{tmp}/b")

    # the tokenizer
    refused("no encoder.json", export_hf, f"{tmp}/good.bin", f"{tmp}/out", "--tokenizer", f"{tmp}/none")
    refused("vocabulary is 300, that of bytes 257", export_hf, f"{tmp}/good.bin", f"{tmp}/out", "--tokenizer", "byte")
    os.makedirs(f"{tmp}/words")
    for text, vocabulary in (
        ("has id 300, want 0 to 299", '{"<|endoftext|>": 300}'),
        ("has id 'x'", '{"<|endoftext|>": "x"}'),
        ("has no <|endoftext|>", '{"a": 1}'),
        ("is no JSON file", '{"a": '),
        ("is no JSON file", "[" * 100000),
        ("is no JSON object", "[1]"),
    ):
        for name in ("encoder.json", "vocab.bpe"):
            with open(f"{tmp}/words/{name}", "w", encoding="utf-8") as file:
                file.write(vocabulary)
        refused(text, export_hf, f"{tmp}/good.bin", f"{tmp}/out", "--tokenizer", f"{tmp}/words")

    for arguments in ([], ["a"], ["a", "b", "--dtype", "fp8"], ["a", "b", "--shard-gb", "0"], ["a", "b", "--frob"]):
        status, _, err = run_main(export_hf, *arguments)
        assert status == 2 and "error" in err, (arguments, status, err)


def test_import_refuses(tmp):
    need_numpy()

    def spoiled(text, **how):
        folder = tempfile.mkdtemp(dir=tmp) + "/hf"
        write_folder(folder, **how)
        refused(text, import_hf, folder, f"{tmp}/out.bin")

    for settings, text in (
        ({"activation_function": "gelu"}, "activation_function is 'gelu', want the tanh GELU, gelu_new"),
        ({"activation_function": "relu"}, "activation_function is 'relu'"),
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon is 1e-06, want 1e-05"),
        ({"scale_attn_weights": False}, "scale_attn_weights is False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"add_cross_attention": True}, "add_cross_attention is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}, want none"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False"),
        ({"n_inner": 64}, "n_inner is 64, want null or 4 * n_embd = 128"),
        ({"model_type": "llama"}, "model_type 'llama', want 'gpt2'"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "GPT2ForSequenceClassification"),
        ({"architectures": 7}, "architectures are 7"),
        ({"n_layer": "leave out"}, "n_layer is None, want a number"),
        ({"n_layer": 2.0}, "n_layer is 2.0, want a number"),
        ({"n_layer": True}, "n_layer is True, want a number"),
        ({"n_layer": 10**9}, "1000000000 layers, want 1 to 1024"),
        ({"n_layer": 3}, "has no h.2.ln_1.weight"),
        ({"n_layer": 1}, "has tensors that the model has no place for: h.1.attn.c_attn.bias"),
        ({"n_head": 3}, "do not divide into 3 heads"),
        ({"n_head": 8}, "head size 4"),
        ({"n_positions": 33}, "transformer.wpe.weight is (32, 32), want (33, 32) by config.json"),
        ({"vocab_size": 299}, "transformer.wte.weight is (300, 32), want (299, 32)"),
        ({"vocab_size": 65537}, "vocabulary of 65537"),
        ({"n_embd": 64}, "want (300, 64)"),
    ):
        spoiled(text, settings=settings)

    def change(name, value=None, like=None):
        def to(tensors):
            new = tensors.pop(name) if name in tensors else None
            if value is not None:
                tensors[name] = value(tensors[like] if like else new)

        return to

    qkv = "transformer.h.1.attn.c_attn.weight"
    wte = "transformer.wte.weight"
    spoiled("has no h.1.attn.c_attn.weight", change=change(qkv))
    spoiled(f"{qkv} is (96, 32), want (32, 96)", change=change(qkv, lambda t: np.ascontiguousarray(t.T)))
    spoiled(f"{qkv} is (32, 95), want (32, 96)", change=change(qkv, lambda t: t[:, :95].copy()))
    spoiled("no place for: h.2.ln_1.bias", change=change("transformer.h.2.ln_1.bias", np.copy, "transformer.ln_f.bias"))
    spoiled("no place for: score.weight", change=change("score.weight", np.copy, wte))
    spoiled("has both", change=change("wte.weight", np.copy, wte))
    spoiled("is I32, want one of F32, BF16, F16", change=change(qkv, lambda t: t.astype(np.int32)))
    spoiled("lm_head.weight is not wte.weight", change=change("lm_head.weight", lambda t: t + 1e-3, wte))
    spoiled("lm_head.weight is not wte.weight", change=change("lm_head.weight", lambda t: t[:299].copy(), wte))
    spoiled("is I64, want one of", change=change("lm_head.weight", lambda t: t.astype(np.int64), wte))

    # files
    folder = f"{tmp}/files"
    refused("is no folder", import_hf, folder, f"{tmp}/out.bin")
    write_folder(folder)
    whole = read_bytes(f"{folder}/model.safetensors")
    for length in (0, 4, 8, 100, len(whole) // 2, len(whole) - 1):
        with open(f"{folder}/model.safetensors", "wb") as file:
            file.write(whole[:length])
        refused("is no safetensors file, or damaged", import_hf, folder, f"{tmp}/out.bin")
    with open(f"{folder}/model.safetensors", "wb") as file:
        file.write(whole.replace(b"{", b"[", 1))
    refused("is no safetensors file, or damaged", import_hf, folder, f"{tmp}/out.bin")
    os.remove(f"{folder}/model.safetensors")
    refused("has no weights", import_hf, folder, f"{tmp}/out.bin")
    with open(f"{folder}/config.json", "wb") as file:
        file.write(b"\xff\xfe{")
    refused("is no JSON file", import_hf, folder, f"{tmp}/out.bin")
    os.remove(f"{folder}/config.json")
    refused("No such file", import_hf, folder, f"{tmp}/out.bin")
    for arguments in ([], ["a"], ["a", "b", "--dtype", "fp8"], ["a", "b", "--frob"]):
        status, _, err = run_main(import_hf, *arguments)
        assert status == 2 and "error" in err, (arguments, status, err)


def test_nothing_is_overwritten_unasked(tmp):
    need_numpy()
    random_model(f"{tmp}/1.bin", 5, seed=1)
    random_model(f"{tmp}/2.bin", 5, seed=2)
    for i in (1, 2):
        done(export_hf, f"{tmp}/{i}.bin", f"{tmp}/{i}")
    done(export_hf, f"{tmp}/1.bin", f"{tmp}/out", "--shard-gb", "0.00002")
    before = contents(f"{tmp}/out")
    refused("exists: --force replaces it", export_hf, f"{tmp}/2.bin", f"{tmp}/out")
    assert contents(f"{tmp}/out") == before
    done(export_hf, f"{tmp}/2.bin", f"{tmp}/out", "--force")
    assert contents(f"{tmp}/out") == contents(f"{tmp}/2")  # no shard of the first is left
    with open(f"{tmp}/out/thesis.tex", "w", encoding="utf-8") as file:
        file.write("a year's work")
    before = contents(f"{tmp}/out")
    refused("'thesis.tex' in it is not of an export's files", export_hf, f"{tmp}/1.bin", f"{tmp}/out", "--force")
    assert contents(f"{tmp}/out") == before
    os.makedirs(f"{tmp}/empty")
    done(export_hf, f"{tmp}/1.bin", f"{tmp}/empty")
    assert contents(f"{tmp}/empty") == contents(f"{tmp}/1")
    os.symlink(f"{tmp}/2", f"{tmp}/link")
    refused("it is no folder", export_hf, f"{tmp}/1.bin", f"{tmp}/link", "--force")
    refused("exists", export_hf, f"{tmp}/1.bin", f"{tmp}/1.bin")
    refused("it is no folder", export_hf, f"{tmp}/1.bin", f"{tmp}/1.bin", "--force")

    refused("exists: --force replaces it", import_hf, f"{tmp}/1", f"{tmp}/2.bin")
    done(import_hf, f"{tmp}/1", f"{tmp}/2.bin", "--force")
    assert read_bytes(f"{tmp}/2.bin") == read_bytes(f"{tmp}/1.bin")
    refused("it exists and is no file", import_hf, f"{tmp}/1", f"{tmp}/2", "--force")
    refused("it exists and is no file", import_hf, f"{tmp}/1", "/dev/null", "--force")


def run_script(script, *arguments, before):
    """(exit status, stderr) of the script in a process of its own, in which `before` ran first."""
    main = f"import {script}; {before}; sys.exit({script}.main(sys.argv[3:]))"
    code = f"import os, sys; sys.path += sys.argv[1:3]; {main}"
    command = [sys.executable, "-c", code, HERE, DEPENDENCIES, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stderr


def interrupt(n, action):
    """Let the n-th call that orders what is on disk do `action` instead. Returns what puts the calls back."""
    calls = 0

    def interrupted(function):
        def wrapped(*arguments, **named):
            nonlocal calls
            calls += 1
            if calls == n:
                action()
            return function(*arguments, **named)

        return wrapped

    true = {name: getattr(os, name) for name in ("mkdir", "rename", "fsync", "remove", "rmdir", "chmod")}
    for name, function in true.items():
        setattr(os, name, interrupted(function))
    return lambda: [setattr(os, name, function) for name, function in true.items()]


KILL = "import signal, test_hf; test_hf.interrupt({n}, lambda: os.kill(os.getpid(), signal.SIGKILL))"
# A file that grows beyond the limit: an error, as from a full disk, or with the second line the end of the process.
FULL = "import resource, signal; resource.setrlimit(resource.RLIMIT_FSIZE, (10000, 10000))"
KILL_IN_WRITE = FULL + "; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)"


def test_kills(tmp):
    """After a kill at any moment the output is absent, the old one or the new one, and the next run goes through."""
    need_numpy()
    for i in (1, 2):
        random_model(f"{tmp}/{i}.bin", 5, seed=i)
        done(export_hf, f"{tmp}/{i}.bin", f"{tmp}/{i}")
    old, new = contents(f"{tmp}/1"), contents(f"{tmp}/2")
    killed = seen_old = seen_new = 0
    for n in range(1, 40):
        done(export_hf, f"{tmp}/1.bin", f"{tmp}/out", *(["--force"] if os.path.exists(f"{tmp}/out") else []))
        status, err = run_script("export_hf", f"{tmp}/2.bin", f"{tmp}/out", "--force", before=KILL.format(n=n))
        if os.path.exists(f"{tmp}/out"):
            found = contents(f"{tmp}/out")
            assert found in (old, new), (n, list(found))
            seen_old += found == old
            seen_new += found == new
        else:
            assert contents(f"{tmp}/out.old.tmp") == old and contents(f"{tmp}/out.tmp") == new, n
        if status == 0:
            break
        assert status == -signal.SIGKILL, (status, err)
        killed += 1
    assert status == 0 and killed > 10 and seen_old > 5 and seen_new > 2, (killed, seen_old, seen_new)
    assert sorted(os.listdir(tmp)) == ["1", "1.bin", "2", "2.bin", "out"]
    status, err = run_script("export_hf", f"{tmp}/1.bin", f"{tmp}/out", "--force", before=KILL_IN_WRITE)
    assert status == -signal.SIGXFSZ and contents(f"{tmp}/out") == new, (status, err)
    assert "model.safetensors" not in os.listdir(f"{tmp}/out.tmp"), os.listdir(f"{tmp}/out.tmp")
    done(export_hf, f"{tmp}/1.bin", f"{tmp}/out", "--force")
    assert contents(f"{tmp}/out") == old and sorted(os.listdir(tmp)) == ["1", "1.bin", "2", "2.bin", "out"]
    for n in (1, 2, 3):  # fsync, rename, fsync of the folder
        with contextlib.suppress(FileNotFoundError):
            os.remove(f"{tmp}/out.bin")
        status, err = run_script("import_hf", f"{tmp}/2", f"{tmp}/out.bin", before=KILL.format(n=n))
        assert status == -signal.SIGKILL, (n, status, err)
        assert os.path.exists(f"{tmp}/out.bin") == (n == 3), n
        done(import_hf, f"{tmp}/2", f"{tmp}/out.bin", "--force")
        assert read_bytes(f"{tmp}/out.bin") == read_bytes(f"{tmp}/2.bin")
        assert not os.path.exists(f"{tmp}/out.bin.tmp")


def test_full_disk(tmp):
    """No file may be longer than 10,000 bytes: what a full disk looks like to a program. And: every call may fail."""
    need_numpy()
    random_model(f"{tmp}/a.bin", 5)
    done(export_hf, f"{tmp}/a.bin", f"{tmp}/a")
    names, old = sorted(os.listdir(tmp)), contents(f"{tmp}/a")
    for script, *arguments in (
        ("export_hf", f"{tmp}/a.bin", f"{tmp}/out"),
        ("export_hf", f"{tmp}/a.bin", f"{tmp}/a", "--force", "--dtype", "fp32"),
        ("import_hf", f"{tmp}/a", f"{tmp}/out.bin"),
        ("import_hf", f"{tmp}/a", f"{tmp}/a.bin", "--force"),
    ):
        status, err = run_script(script, *arguments, before=FULL)
        assert status == 1 and err.startswith("error: ") and err.count("\n") == 1 and "large" in err, (status, err)
        assert sorted(os.listdir(tmp)) == names and contents(f"{tmp}/a") == old, (script, os.listdir(tmp))

    def no_space():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    random_model(f"{tmp}/b.bin", 5, seed=2)
    done(export_hf, f"{tmp}/b.bin", f"{tmp}/b")
    new, failures = contents(f"{tmp}/b"), 0
    for n in range(1, 40):
        restore = interrupt(n, no_space)
        try:
            status, _, err = run_main(export_hf, f"{tmp}/b.bin", f"{tmp}/a", "--force")
        finally:
            restore()
        assert contents(f"{tmp}/a") in (old, new), n
        assert status == 0 or "No space left" in err and err.count("\n") == 1, (n, status, err)
        failures += status
        assert not os.path.exists(f"{tmp}/a.tmp"), n
        done(export_hf, f"{tmp}/a.bin", f"{tmp}/a", "--force")
        assert not os.path.exists(f"{tmp}/a.old.tmp"), n
        if status == 0:
            break
    assert status == 0 and failures > 10, (status, failures)


def test_help_and_a_missing_package(_tmp):
    """Both work on a Python that has nothing installed (-S leaves out what is)."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for script in ("export_hf.py", "import_hf.py"):
        command = [sys.executable, "-S", os.path.join(HERE, script)]
        ended = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False, env=environment)
        assert ended.returncode == 0 and "--dtype" in ended.stdout and "GPT2LMHeadModel" in ended.stdout, ended
        ended = subprocess.run([*command, "a", "b"], capture_output=True, text=True, check=False, env=environment)
        assert ended.returncode == 1 and ended.stdout == "", ended
        assert ended.stderr == (
            "error: No module named 'numpy'. Please: pip install numpy safetensors ml_dtypes\n"
        ), ended.stderr


def main():
    warnings.simplefilter("error")  # a warning on the user's screen is a failure
    passed = failed = skipped = 0
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        folder = tempfile.mkdtemp()
        try:
            test(folder)
            print(f"ok       {name}")
            passed += 1
        except Skipped as reason:
            print(f"skipped  {name}: {reason}")
            skipped += 1
        except Exception:  # whatever goes wrong in a test is that test's failure
            print(f"FAILED   {name}\n{traceback.format_exc()}")
            failed += 1
        finally:
            shutil.rmtree(folder)
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
