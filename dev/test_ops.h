// Every op of floor.h, one call at a time: a floor under test ("subject") against the CPU floor ("reference").
//
//   nvcc build   subject = the GPU: bit-exact where an op only rounds, derived thresholds elsewhere
//   g++ build    subject = the CPU floor on 2 threads, reference = on 1: bit-exact everywhere
//
// Each call is made on poisoned outputs between guard zones, and twice on the subject: the bits must repeat. Products
// and attention are judged on both floors by FP64 loops over the exact decoded operands.
#ifndef TEST_OPS_H
#define TEST_OPS_H

#include "test_ops_attention.h"
#include "test_ops_matmul.h"
#include "test_ops_rows.h"
#include "test_ops_shards.h"
#include "test_ops_step.h"

namespace ops {

static const NamedTest op_tests[] = {
    {"ops_embedding_forward", ops_embedding_forward},
    {"ops_embedding_backward", ops_embedding_backward},
    {"ops_layernorm_forward", ops_layernorm_forward},
    {"ops_layernorm_backward", ops_layernorm_backward},
    {"ops_matmul_forward", ops_matmul_forward},
    {"ops_matmul_dgrad", ops_matmul_dgrad},
    {"ops_matmul_wgrad", ops_matmul_wgrad},
    {"ops_attention", ops_attention},
    {"ops_attention_cudnn", ops_attention_cudnn},
    {"ops_attention_fp8", ops_attention_fp8},
    {"ops_gelu_forward", ops_gelu_forward},
    {"ops_gelu_backward", ops_gelu_backward},
    {"ops_quantize_forward", ops_quantize_forward},
    {"ops_quantize_backward", ops_quantize_backward},
    {"ops_quantize_backward_bf16_rows", ops_quantize_backward_bf16_rows},
    {"ops_attention_backward_fp8", ops_attention_backward_fp8},
    {"ops_quantize_weight", ops_quantize_weight},
    {"ops_classifier", ops_classifier},
    {"ops_classifier_fp8", ops_classifier_fp8},
    {"ops_loss_add", ops_loss_add},
    {"ops_global_norm", ops_global_norm},
    {"ops_adamw_update", ops_adamw_update},
    {"ops_params_from_master", ops_params_from_master},
    {"ops_scale_slots", ops_scale_slots},
    {"ops_bf16_round_trip", ops_bf16_round_trip},
    {"ops_norm_of_slices", ops_norm_of_slices},
    {"ops_norm_of_ranks", ops_norm_of_ranks},
    {"ops_grad_quantize", ops_grad_quantize},
    {"ops_grad_sum", ops_grad_sum},
    {"ops_grad_pack", ops_grad_pack},
    {"ops_grad_unpack", ops_grad_unpack},
    {"ops_grad_amax", ops_grad_amax},
    {"ops_grad_quantize_shared", ops_grad_quantize_shared},
    {"ops_grad_dequantize_shared", ops_grad_dequantize_shared},
    {"ops_grad_reduce_error", ops_grad_reduce_error},
    {"ops_param_pack", ops_param_pack},
    {"ops_quantize_slice", ops_quantize_slice},
    {"ops_transpose_weight", ops_transpose_weight},
};
enum { NUM_OP_TESTS = sizeof(op_tests) / sizeof(op_tests[0]) };

} // namespace ops

#endif
