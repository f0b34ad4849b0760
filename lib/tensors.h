// The parameter table: every tensor of the model by name, with shape, initialisation, decay and place.
//
// Memory, optimizer, checkpoint and communication iterate this table. The order is llm.c's model file order, each
// tensor holding ALL layers (layer-major), so the flat FP32 arrays of master weights, moments and gradients have the
// layout of an llm.c checkpoint's payload:
//     offset of layer l of tensor t = table.tensor[t].offset + l * table.tensor[t].n
#ifndef TENSORS_H
#define TENSORS_H

#include <stddef.h>

#include "check.h"
#include "config.h"

typedef enum {
    TENSOR_WTE,      // token embedding, tied with the LM head
    TENSOR_WPE,      // position embedding
    TENSOR_LN1W,     // LayerNorm in front of attention
    TENSOR_LN1B,     //
    TENSOR_QKVW,     // linear layer: query, key, value
    TENSOR_QKVB,     //
    TENSOR_PROJW,    // linear layer: attention output projection
    TENSOR_PROJB,    //
    TENSOR_LN2W,     // LayerNorm in front of the MLP
    TENSOR_LN2B,     //
    TENSOR_FCW,      // linear layer: MLP up
    TENSOR_FCB,      //
    TENSOR_FCPROJW,  // linear layer: MLP down
    TENSOR_FCPROJB,  //
    TENSOR_LNFW,     // final LayerNorm
    TENSOR_LNFB,     //
    NUM_TENSORS
} TensorName;

typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_NORMAL_RESIDUAL } TensorInit;

typedef struct {
    const char* name;   // llm.c's name
    int layers;         // 1, or L
    size_t rows, cols;  // shape of one layer; vectors have rows = 1
    size_t n;           // rows * cols
    size_t offset;      // of layer 0 in the flat arrays, in elements
    TensorInit init;    // NORMAL: N(0, 0.02); NORMAL_RESIDUAL: N(0, 0.02 / sqrt(2L)) (GPT-2 paper, section 2.3)
    int decay;          // weight decay applies (matrices only)
    int is_linear;      // one of the four linears of a block: FP8 in FP8 mode
} TensorSpec;

typedef struct {
    TensorSpec tensor[NUM_TENSORS];
    size_t num_parameters; // elements of the flat arrays
} ParameterTable;

static inline ParameterTable parameter_table(GptConfig g) {
    size_t C = (size_t)g.channels;
    int L = g.num_layers;
    ParameterTable table = {{
        [TENSOR_WTE] = {"wte", 1, (size_t)g.padded_vocab_size, C, 0, 0, INIT_NORMAL, 1, 0},
        [TENSOR_WPE] = {"wpe", 1, (size_t)g.max_seq_len, C, 0, 0, INIT_NORMAL, 1, 0},
        [TENSOR_LN1W] = {"ln1w", L, 1, C, 0, 0, INIT_ONE, 0, 0},
        [TENSOR_LN1B] = {"ln1b", L, 1, C, 0, 0, INIT_ZERO, 0, 0},
        [TENSOR_QKVW] = {"qkvw", L, 3 * C, C, 0, 0, INIT_NORMAL, 1, 1},
        [TENSOR_QKVB] = {"qkvb", L, 1, 3 * C, 0, 0, INIT_ZERO, 0, 0},
        [TENSOR_PROJW] = {"attprojw", L, C, C, 0, 0, INIT_NORMAL_RESIDUAL, 1, 1},
        [TENSOR_PROJB] = {"attprojb", L, 1, C, 0, 0, INIT_ZERO, 0, 0},
        [TENSOR_LN2W] = {"ln2w", L, 1, C, 0, 0, INIT_ONE, 0, 0},
        [TENSOR_LN2B] = {"ln2b", L, 1, C, 0, 0, INIT_ZERO, 0, 0},
        [TENSOR_FCW] = {"fcw", L, 4 * C, C, 0, 0, INIT_NORMAL, 1, 1},
        [TENSOR_FCB] = {"fcb", L, 1, 4 * C, 0, 0, INIT_ZERO, 0, 0},
        [TENSOR_FCPROJW] = {"fcprojw", L, C, 4 * C, 0, 0, INIT_NORMAL_RESIDUAL, 1, 1},
        [TENSOR_FCPROJB] = {"fcprojb", L, 1, C, 0, 0, INIT_ZERO, 0, 0},
        [TENSOR_LNFW] = {"lnfw", 1, 1, C, 0, 0, INIT_ONE, 0, 0},
        [TENSOR_LNFB] = {"lnfb", 1, 1, C, 0, 0, INIT_ZERO, 0, 0},
    }, 0};
    for (int t = 0; t < NUM_TENSORS; t++) {
        TensorSpec* spec = &table.tensor[t];
        spec->n = spec->rows * spec->cols;
        spec->offset = table.num_parameters;
        table.num_parameters += (size_t)spec->layers * spec->n;
    }
    return table;
}

#endif
