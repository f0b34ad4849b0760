// Micro-batches on their way from the loader to the device. A batch is one block of 5 BT + 1 ints, moved by one copy:
//
//     tokens        (BT)
//     targets       (BT)
//     rows          (BT)       of the TokenIndex, for the embedding's gradient
//     bucket_token  (BT)
//     bucket_start  (BT + 1)
//
// There is one on the device, which the passes read, and a ring of pinned ones on the host:
//
//     batch_ring_create     once
//     batch_ring_next       in front of every micro-step: the loader's next batch is on its way to the device
//     batch_ring_ahead      while the device works on a step: the next step's first batch is made
//     batch_ring_position   where the data goes on, for a checkpoint
//     batch_ring_look       a batch that is not trained on
//     batch_ring_free
//
// A ring of one more than a step has micro-steps: none waits for the copy of an earlier one, and the step after it can
// be prepared before the wait for its end.
#if (defined(CPU_FLOOR) && !defined(BATCH_H_CPU)) || (!defined(CPU_FLOOR) && !defined(BATCH_H_GPU))
#ifdef CPU_FLOOR
#define BATCH_H_CPU
#else
#define BATCH_H_GPU
#endif

#include "check.h"

#include "dataloader.h"
#include "floor.h"
#include "op_cost.h"
#include "token_index.h"

// One micro-batch on the host (pinned) or on the device.
typedef struct {
    int* tokens;  // (BT)
    int* targets; // (BT)
    TokenIndex index;
} Batch;

typedef struct {
    Device* dev;
    int BT;
    int rewinds;               // every step's first batch is the loader's first (--overfit-single-batch)
    void* block;               // pinned, holds the batches
    Batch* batch;              // (size) on the host
    int size;                  // micro-steps of a step, and one more
    int next;                  // where in the ring the next batch goes
    int is_ahead;              // is it there already?
    DataPosition before_ahead; // where the loader stood before it gave that batch
    Batch looked_at;           // on the host, beside the ring
    TokenCounter counter;
} BatchRing;

static inline size_t batch_bytes(size_t BT) { return (5 * BT + 1) * sizeof(int); }

// The batch in a block of batch_bytes(BT), on either side.
static inline Batch batch_at(void* block, size_t BT) {
    int* p = (int*)block;
    Batch batch = {p, p + BT, {p + 2 * BT, p + 3 * BT, p + 4 * BT, 0}};
    return batch;
}

// A ring for steps of `micro_steps` batches of BT tokens, each below V. dev must outlive it.
static inline BatchRing batch_ring_create(Device* dev, int BT, int micro_steps, int V, int rewinds) {
    BatchRing ring;
    memset(&ring, 0, sizeof(ring));
    ring.dev = dev;
    ring.BT = BT;
    ring.rewinds = rewinds;
    ring.size = micro_steps + 1;
    ring.counter = token_counter_create(V);
    size_t bytes = batch_bytes((size_t)BT);
    ring.block = pinned_malloc(dev, ((size_t)ring.size + 1) * bytes);
    ring.batch = (Batch*)calloc_or_die((size_t)ring.size, sizeof(Batch));
    for (int i = 0; i < ring.size; i++) {
        ring.batch[i] = batch_at((char*)ring.block + (size_t)i * bytes, (size_t)BT);
    }
    ring.looked_at = batch_at((char*)ring.block + (size_t)ring.size * bytes, (size_t)BT);
    return ring;
}

static inline void batch_ring_free(BatchRing* ring) {
    pinned_release(ring->dev, ring->block);
    free(ring->batch);
    token_counter_free(&ring->counter);
}

// The loader's next micro-batch into `host`, a batch of the ring's block.
static inline void batch_stage(BatchRing* ring, Batch* host, DataLoader* loader) {
    dataloader_next(loader);
    memcpy(host->tokens, loader->inputs, (size_t)ring->BT * sizeof(int));
    memcpy(host->targets, loader->targets, (size_t)ring->BT * sizeof(int));
    host->index.num_buckets = token_index_build(&ring->counter, host->index.rows, host->index.bucket_token,
                                                host->index.bucket_start, host->tokens, ring->BT);
}

// Queue the copy of a staged micro-batch to the device. Returns the device's index.
static inline TokenIndex batch_upload(BatchRing* ring, const Batch* device, const Batch* host) {
    device_copy_in(ring->dev, device->tokens, host->tokens, batch_bytes((size_t)ring->BT));
    TokenIndex index = device->index;
    index.num_buckets = host->index.num_buckets;
    return index;
}

// Make the first micro-batch of the next step, unless it is there. Between the queueing of a step and the wait for it
// this costs nothing: the device is busy, and finds the next step's work sooner.
// NOTE: the loader is then one batch ahead of what has been trained on.
static inline void batch_ring_ahead(BatchRing* ring, DataLoader* loader) {
    if (ring->is_ahead) { return; }
    cost_nobody(ring->dev);
    ring->before_ahead = loader->at;
    if (ring->rewinds) { dataloader_rewind(loader); }
    batch_stage(ring, &ring->batch[ring->next], loader);
    ring->is_ahead = 1;
}

// The micro-batch that is trained on next, on its way to `device`; is_first: of its step. Returns the device's index.
static inline TokenIndex batch_ring_next(BatchRing* ring, const Batch* device, DataLoader* loader, int is_first) {
    Batch* host = &ring->batch[ring->next];
    cost_nobody(ring->dev);
    if (is_first) {
        batch_ring_ahead(ring, loader);
    } else {
        batch_stage(ring, host, loader);
    }
    ring->next = (ring->next + 1) % ring->size;
    ring->is_ahead = 0;
    return batch_upload(ring, device, host);
}

// Where the data goes on: behind the last batch that was trained on.
static inline DataPosition batch_ring_position(const BatchRing* ring, const DataLoader* loader) {
    return ring->is_ahead ? ring->before_ahead : loader->at;
}

// The next micro-batch of a loader that the ring does not train on, on its way to `device`. Returns the device's index.
// NOTE: there is room for one: the result of the batch before it has to be waited for.
static inline TokenIndex batch_ring_look(BatchRing* ring, const Batch* device, DataLoader* loader) {
    batch_stage(ring, &ring->looked_at, loader);
    return batch_upload(ring, device, &ring->looked_at);
}

// The same for a text of n tokens, without targets and index; T - n (up to BT in all) more repeat its last one.
static inline void batch_ring_look_at_text(BatchRing* ring, const Batch* device, const int* tokens, int n, int T) {
    int* host = ring->looked_at.tokens;
    for (int i = 0; i < T; i++) {
        host[i] = tokens[i < n ? i : n - 1];
    }
    device_copy_in(ring->dev, device->tokens, host, (size_t)T * sizeof(int));
}

#endif
