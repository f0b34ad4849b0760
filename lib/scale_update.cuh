// Scales of the next step: every slot takes in this step's amax. The decision is scale_slot_step of scaling.h, the very
// lines that run on the CPU; here is only where the slots are and who steps them.
#ifndef SCALE_UPDATE_CUH
#define SCALE_UPDATE_CUH

#include "gpu.cuh"

// ---------------------------------------------------------------------------------------------------------------------
// CUDA kernels

// amaxes (num_slots) = slot amaxes, NaN as +Inf.   one thread per slot
__global__ void scale_slots_gather_kernel(float* amaxes, const ScaleSlot* slots, int num_slots) {
    kernel_begin();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= num_slots) { return; }
    float amax = slots[i].amax;
    amaxes[i] = amax == amax ? amax : __int_as_float(0x7F800000);
}

// scale_slot_step(&slots[i], amaxes[i]) for block i; *slots_warming counts those that want a measuring pass next.
// One thread decides. The block carries the slot (4 KB) to shared memory and back, because one thread walking the ring
// in device memory would wait for every entry: 1024 of them on a long history.
//   bits     deterministic: an integer count does not depend on the order of its atomics
__global__ void __launch_bounds__(128)
    scale_slots_step_kernel(ScaleSlot* slots, const float* amaxes, ScaleRecipe recipe, int* slots_warming) {
    kernel_begin();
    __shared__ ScaleSlot slot;
    const int num_words = sizeof(ScaleSlot) / sizeof(uint32_t);
    uint32_t* there = (uint32_t*)&slots[blockIdx.x];
    uint32_t* here = (uint32_t*)&slot;
    for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
        here[i] = there[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        scale_slot_step(&slot, amaxes[blockIdx.x], recipe);
        if (scale_slot_is_warming(&slot)) { atomicAdd(slots_warming, 1); }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_words; i += blockDim.x) {
        there[i] = here[i];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// kernel launchers

void scale_slots_gather(Device* dev, float* amaxes, const ScaleSlot* slots, int num_slots) {
    cost_scale_slots(dev, num_slots);
    if (num_slots <= 0) { return; }
    launch(dev, scale_slots_gather_kernel, (unsigned)ceil_div((size_t)num_slots, 128), 128, 0, amaxes, slots,
           num_slots);
}

void scale_slots_step(Device* dev, ScaleSlot* slots, const float* amaxes, int num_slots, ScaleRecipe recipe,
                      StepState* state) {
    cost_scale_slots(dev, num_slots);
    cuda_check(cudaMemsetAsync(&state->slots_warming, 0, sizeof(int), dev->stream));
    if (num_slots <= 0) { return; }
    launch(dev, scale_slots_step_kernel, num_slots, 128, 0, slots, amaxes, recipe, &state->slots_warming);
}

#endif
