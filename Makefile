# `make help` lists the targets. Everything that is compiled goes to build/, except the programs themselves.
#
#     make                the GPU program, ./train_gpt_fp8 (nvcc, Hopper)
#     make cpu            the same program on the CPU floor of ops, ./train_gpt_fp8_cpu (g++)
#
# Variables (make NAME=value):
#     CUDNN=0             leave the optional cuDNN attention out; by default it is in when its headers are found
#     NVCC=, CUDA_PATH=   another CUDA toolkit than the one on PATH (or in /usr/local/cuda)
#     NCCL_PATH=          an NCCL outside the toolkit: has include/nccl.h and lib/libnccl.so
#     CUDNN_PATH=         a cuDNN outside the toolkit: has include/cudnn.h
#     XXHASH_PATH=        an xxHash outside the compiler's path: the folder that has xxhash.h (default: .deps/xxhash)
#     CUDNN_FRONTEND_PATH= cudnn-frontend: the folder that has cudnn_frontend.h, or its parent
#     MARCH=              -march of `make cpu`, default native; x86-64-v3 makes a program that runs elsewhere too
#     SANITIZE=           flags of `make host`; empty turns the sanitizers off
#     ARGS=               arguments for `make bench-<op>`
#     DEBUG=1             ranks compare all FP8 scales after every step, on the GPU, too
#     DEVICE=cpu|gpu      what `make quickstart` uses; default: the GPU if there is a Hopper GPU

SHELL := /bin/bash
.DEFAULT_GOAL := train_gpt_fp8
.DELETE_ON_ERROR:
.SECONDEXPANSION: # so that $$(CUDNN_OBJECT) looks for cuDNN only when a GPU target is built
MAKEFLAGS += --no-builtin-rules
.SUFFIXES:

CC ?= gcc
CXX ?= g++
ifeq ($(origin CC),default)
CC := gcc
endif
ifeq ($(origin CXX),default)
CXX := g++
endif

HEADERS := $(wildcard lib/*.h)
KERNELS := $(wildcard lib/*.cuh)
HOST_TESTS := $(patsubst dev/host/%.c,build/host/%,$(wildcard dev/host/test_*.c))
BENCHES := $(patsubst dev/%.cu,build/bench/%,$(wildcard dev/*.cu))
TOOLS := data/tokenize data/detokenize data/make_corpus
GPU_PROGRAMS := $(patsubst %.cu,%,$(wildcard train_gpt_fp8.cu test_gpt_fp8.cu))

WARNINGS := -Wall -Wextra -Werror
MARCH ?= native
# What a program that is built on one machine and run on another may assume of its processor.
PORTABLE_ARCH := $(if $(filter x86_64,$(shell uname -m)),-march=x86-64-v3)

# xxHash, a header only; where it cannot be installed (a machine without a network), .deps/xxhash may bring it.
XXHASH_PATH ?= .deps/xxhash
XXHASH_FLAGS := $(addprefix -isystem ,$(wildcard $(XXHASH_PATH)))

# A variable that runs its command at most once, and only if a target needs it.
once = $(eval $(1) := $(2))$($(1))

# ----------------------------------------------------------------------------------------------------------------------
# MPI: asked from its compiler wrapper. The C one: the programs use MPI's C interface only, and its old C++ classes,
# which mpi.h drags in for a C++ compiler, neither compile without warnings nor are they needed.

MPICC ?= mpicc
MPI_CFLAGS = $(call once,MPI_CFLAGS,-DOMPI_SKIP_MPICXX $(shell $(MPICC) --showme:compile))
MPI_LIBS = $(call once,MPI_LIBS,$(shell $(MPICC) --showme:link))
comma := ,
# nvcc hands unknown flags to nobody: give the compiler's and the linker's theirs by name.
MPI_NVCC_CFLAGS = $(patsubst -pthread,-Xcompiler -pthread,$(MPI_CFLAGS))
MPI_NVCC_LIBS = $(patsubst -pthread,-Xcompiler -pthread,$(patsubst -Wl$(comma)%,-Xlinker %,$(MPI_LIBS)))

# ----------------------------------------------------------------------------------------------------------------------
# The programs' version, in an object of its own: a commit links them anew and compiles nothing. Written only when it has
# changed.

build/version.c: FORCE
	@mkdir -p build
	@echo "extern const char program_version[]; const char program_version[] = \"$$(scripts/version.sh)\";" >$@.new
	@if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi

build/version.o: build/version.c
	$(CC) $(C_FLAGS) -c -o $@ $<

# ----------------------------------------------------------------------------------------------------------------------
# CUDA

NVCC ?= $(call once,NVCC,$(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc)))
CUDA_PATH ?= $(call once,CUDA_PATH,$(patsubst %/bin/nvcc,%,$(realpath $(NVCC))))
NCCL_PATH ?= $(wildcard .deps/nccl)
SM90A := -gencode=arch=compute_90a,code=sm_90a
NVCC_FLAGS = -std=c++17 -O3 $(SM90A) -Werror all-warnings -Xcompiler -Wall,-Wextra,-Werror \
    $(addprefix -Xcompiler ,$(PORTABLE_ARCH)) $(MPI_NVCC_CFLAGS) $(addprefix -I,$(addsuffix /include,$(NCCL_PATH))) \
    $(CUDNN_DEFINE) $(XXHASH_FLAGS) $(if $(filter 1,$(DEBUG)),-DDEBUG)
# The run-time path makes the program find the libraries it was linked with, wherever the toolkit is.
NVCC_LIBS = $(foreach dir,$(CUDA_PATH)/lib64 $(addsuffix /lib,$(abspath $(NCCL_PATH))),-L$(dir) -Xlinker -rpath,$(dir)) \
    -lcublasLt -lnccl -ldl -lpthread $(MPI_NVCC_LIBS)

# Optional: attention by cuDNN, one translation unit. libcudnn itself is opened at run time.
CUDNN ?= 1
PYTHON_PACKAGES = $(call once,PYTHON_PACKAGES,$(shell python3 -c \
    'import sysconfig as s, site; print(s.get_path("purelib"), *site.getsitepackages(), site.getusersitepackages())' \
    2>/dev/null))
CUDNN_FRONTEND_DIR = $(call once,CUDNN_FRONTEND_DIR,$(firstword $(patsubst %/cudnn_frontend.h,%,$(wildcard \
    $(if $(CUDNN_FRONTEND_PATH),$(addprefix $(CUDNN_FRONTEND_PATH)/,cudnn_frontend.h include/cudnn_frontend.h), \
    $(addsuffix /cudnn_frontend.h,.deps/cudnn-frontend/include /usr/include /usr/local/include \
    $(addsuffix /include,$(PYTHON_PACKAGES)) $(addsuffix /nvidia/cudnn_frontend/include,$(PYTHON_PACKAGES))))))))
CUDNN_DIR = $(call once,CUDNN_DIR,$(firstword $(patsubst %/cudnn.h,%,$(wildcard \
    $(if $(CUDNN_PATH),$(CUDNN_PATH)/include/cudnn.h,$(addsuffix /cudnn.h,$(CUDA_PATH)/include /usr/include \
    /usr/include/x86_64-linux-gnu /usr/include/aarch64-linux-gnu /usr/local/include \
    $(addsuffix /nvidia/cudnn/include,$(PYTHON_PACKAGES))))))))
# Where libcudnn lies beside those headers: looked at, at run time, when the loader knows of none.
CUDNN_LIBRARY_DIR = $(patsubst %/libcudnn.so.9,%,$(firstword $(wildcard $(addprefix $(CUDNN_DIR)/../,lib/libcudnn.so.9 \
    lib64/libcudnn.so.9))))
WITH_CUDNN = $(if $(filter 1,$(CUDNN)),$(and $(CUDNN_FRONTEND_DIR),$(CUDNN_DIR),$(wildcard lib/attention_cudnn.cpp)))
CUDNN_OBJECT = $(if $(WITH_CUDNN),build/attention_cudnn.o)
CUDNN_DEFINE = $(if $(WITH_CUDNN),-DENABLE_CUDNN)
CUDNN_MISSING = $(strip $(if $(CUDNN_FRONTEND_DIR),,cudnn_frontend.h) $(if $(CUDNN_DIR),,cudnn.h))
CUDNN_STATUS = cuDNN attention: $(strip $(if $(filter-out 1,$(CUDNN)),left out (CUDNN=$(CUDNN)),$(if $(WITH_CUDNN), \
    $(CUDNN_FRONTEND_DIR)/cudnn_frontend.h with $(CUDNN_DIR)/cudnn.h, \
    left out ($(CUDNN_MISSING) not found): the built-in attention is used)))

train_gpt_fp8: build/train_gpt_fp8.o build/version.o $$(CUDNN_OBJECT) | need-nvcc ## the GPU program (default target)
	@echo "$(CUDNN_STATUS)"
	$(NVCC) $(SM90A) -Xcompiler -fopenmp -o $@ $^ $(NVCC_LIBS) -lgomp

build/train_gpt_fp8.o: train_gpt_fp8.cu $(HEADERS) $(KERNELS) build/nvcc.flags | need-nvcc
	$(NVCC) $(NVCC_FLAGS) -Xcompiler -fopenmp -c -o $@ $<

cudnn-status:
	@echo "$(CUDNN_STATUS)"

# It holds both floors of ops: the CPU floor is what the GPU kernels are compared against.
MODEL_TEST := test_gpt_fp8.cu train_gpt_fp8.cu $(wildcard dev/*.h) dev/host/unit.h
test_gpt_fp8: $(MODEL_TEST) $(HEADERS) $(KERNELS) build/nvcc.flags $$(CUDNN_OBJECT) | need-nvcc ## the GPU tests
	$(NVCC) $(NVCC_FLAGS) -Xcompiler -fopenmp -o $@ $< $(CUDNN_OBJECT) $(NVCC_LIBS) -lgomp

build/attention_cudnn.o: lib/attention_cudnn.cpp $(HEADERS) build/nvcc.flags
	$(CXX) -c -std=c++17 -O2 $(WARNINGS) $(PORTABLE_ARCH) -DENABLE_CUDNN \
	    -DCUDNN_BUILD_LIBRARY_DIR='"$(CUDNN_LIBRARY_DIR)"' -isystem $(CUDNN_FRONTEND_DIR) \
	    -isystem $(CUDNN_DIR) -isystem $(CUDA_PATH)/include -o $@ $<

build/bench/%: dev/%.cu $(wildcard dev/*.cuh) $(HEADERS) $(KERNELS) build/nvcc.flags $$(CUDNN_OBJECT) | need-nvcc
	@mkdir -p build/bench
	$(NVCC) $(NVCC_FLAGS) -Xcompiler -fopenmp -o $@ $< $(CUDNN_OBJECT) $(NVCC_LIBS) -lgomp

bench-%: build/bench/% ## bench-<op>: build dev/<op>.cu and run it, e.g. make bench-matmul
	./build/bench/$* $(ARGS)

gpu-targets:
	@echo $(GPU_PROGRAMS) $(BENCHES)

gpu-compile: $(GPU_PROGRAMS) $(BENCHES) ## compile every .cu, warnings are errors; needs nvcc but no GPU

# Written anew only when the flags have changed (CUDNN=0, another toolkit): then everything is built again.
build/nvcc.flags: FORCE
	@mkdir -p build
	@echo '$(NVCC) $(NVCC_FLAGS) $(NVCC_LIBS) $(CUDNN_OBJECT)' | cmp -s - $@ || \
	    echo '$(NVCC) $(NVCC_FLAGS) $(NVCC_LIBS) $(CUDNN_OBJECT)' > $@

need-nvcc:
	@[ -n "$(NVCC)" ] && command -v "$(NVCC)" >/dev/null || { echo "error: no CUDA compiler: nvcc is neither on PATH \
	nor in /usr/local/cuda/bin (make NVCC=...). For the program without a GPU: make cpu" >&2; exit 1; }

# ----------------------------------------------------------------------------------------------------------------------
# CPU

CPU_FLAGS = -std=c++17 -O3 -march=$(MARCH) -fno-math-errno -fno-trapping-math -fopenmp $(WARNINGS) -DCPU_FLOOR \
    $(MPI_CFLAGS) $(XXHASH_FLAGS)
C_FLAGS := -std=c11 -D_GNU_SOURCE $(WARNINGS) $(XXHASH_FLAGS)

cpu: train_gpt_fp8_cpu ## the program for machines without a GPU, ./train_gpt_fp8_cpu

train_gpt_fp8_cpu: build/train_gpt_fp8_cpu.o build/version.o | need-mpi
	$(CXX) -fopenmp -o $@ $^ $(MPI_LIBS) -lm

build/train_gpt_fp8_cpu.o: train_gpt_fp8.cu $(HEADERS) build/cpu.flags | need-mpi
	$(CXX) $(CPU_FLAGS) -x c++ -c -o $@ $<

test_gpt_fp8_cpu: $(MODEL_TEST) $(HEADERS) build/cpu.flags | need-mpi ## the tests of ops and model on the CPU floor
	$(CXX) $(CPU_FLAGS) -x c++ -o $@ $< $(MPI_LIBS) -lm

build/cpu.flags: FORCE
	@mkdir -p build
	@echo '$(CXX) $(CPU_FLAGS) $(MPI_LIBS)' | cmp -s - $@ || echo '$(CXX) $(CPU_FLAGS) $(MPI_LIBS)' > $@

need-mpi:
	@command -v $(firstword $(MPICC)) >/dev/null || { echo "error: no $(MPICC): OpenMPI is missing \
	(scripts/setup.sh installs it: libopenmpi-dev, openmpi-bin)" >&2; exit 1; }

tools: $(TOOLS) ## the data tools: data/tokenize, data/detokenize, data/make_corpus

data/tokenize: TOOL_LIBS := -lpcre2-8
$(TOOLS): data/%: data/%.c $(HEADERS) $(wildcard data/*.h)
	$(CC) $(C_FLAGS) -O3 -fopenmp -o $@ $< $(TOOL_LIBS) -lpthread -lm

# ----------------------------------------------------------------------------------------------------------------------
# tests

SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all

test: ## every test that can run on this machine; the last line is the total
	@scripts/run_tests.sh

host: $(HOST_TESTS) ## host tests (dev/host/test_*.c) under address and undefined-behaviour sanitizers
	@scripts/run_each.sh $(HOST_TESTS)

host-build: $(HOST_TESTS)

# Tests of the CPU floor need OpenMP, those of the ranks need MPI. The others do without, and must: with OpenMP loaded the
# leak check of a forked child (expect_dies) prints a warning of its own beside the one error line.
# The CUDA headers, where there are any, are only the other opinion in test_fp8.c.
HOST_CUDA = $(addprefix -isystem ,$(wildcard $(CUDA_PATH)/include))
uses = $(if $(shell grep -lE '$(1)' $<),$(2))
HOST_FLAGS = $(call uses,device_cpu\.h|reference\.h,-fopenmp) $(call uses,comm_cpu\.h,$(MPI_CFLAGS))
HOST_LIBS = $(call uses,comm_cpu\.h,$(MPI_LIBS)) $(call uses,bpe\.h|tokenize\.c,-lpcre2-8 -lpthread) \
    $(call uses,snapshot_writer\.h|watchdog\.h|comm_cpu\.h,-lpthread) -lm
build/host/%: dev/host/%.c dev/host/unit.h $(HEADERS) $(wildcard data/*.c)
	@mkdir -p build/host
	$(CC) $(C_FLAGS) -O1 -g $(SANITIZE) -Ilib $(HOST_CUDA) $(HOST_FLAGS) -o $@ $< $(HOST_LIBS)

# The replay of the fuzz targets includes them.
build/host/test_fuzz_replay: $(wildcard dev/fuzz/*)

wall: ## every lib/*.h compiles alone, as C11 and as C++17, without CUDA; no op includes another
	@scripts/check_wall.sh

# Fuzz targets, one per reader of files (dev/fuzz/fuzz.h): libFuzzer comes with clang. `make test` replays them with gcc.
CLANG ?= clang
FUZZERS := $(patsubst dev/fuzz/%.c,build/fuzz/%,$(wildcard dev/fuzz/*.c))

fuzz: $(FUZZERS) ## fuzz targets for every reader of files, with clang; dev/fuzz/run.sh runs them

build/fuzz/%: dev/fuzz/%.c $(wildcard dev/fuzz/*.h) $(HEADERS) $(wildcard data/*.c) | need-clang
	@mkdir -p build/fuzz
	$(CLANG) $(C_FLAGS) -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -Ilib -o $@ $< \
	    -lpcre2-8 -lpthread -lm

need-clang:
	@command -v $(firstword $(CLANG)) >/dev/null || { echo "error: no $(CLANG): libFuzzer comes with it \
	(Debian and Ubuntu: clang; CLANG=clang-18 takes another)" >&2; exit 1; }

# ----------------------------------------------------------------------------------------------------------------------
# for the user

quickstart: ## from nothing to a trained model: set up, build, make a corpus, train in FP8 and in BF16, compare
	@scripts/quickstart.sh $(DEVICE)

clean: ## remove everything that was built; runs/ stays
	rm -rf build train_gpt_fp8 train_gpt_fp8_cpu test_gpt_fp8 test_gpt_fp8_cpu $(TOOLS)

help: ## this list
	@grep -hE '^[a-z_0-9%-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | \
	    sed -E 's/^([^:]+):.*## (bench-<op>: )?/\1\t/; s/^bench-%/bench-<op>/' | \
	    awk -F '\t' '{ printf "  make %-16s %s\n", $$1, $$2 }'
	@echo "  variables: see the top of the Makefile"

FORCE:
.PHONY: FORCE cpu tools test host wall gpu-compile quickstart clean help need-nvcc need-mpi \
    cudnn-status gpu-targets host-build fuzz need-clang
