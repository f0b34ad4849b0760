// The ring of micro-batches against the order of the file: what arrives on the device, where a checkpoint would go on,
// and that looking at other data changes neither.
#define CPU_FLOOR
#include "../../lib/device_cpu.h"

#include "../../lib/batch.h"

#include "unit.h"

enum { B = 2, T = 4, BT = B * T, V = 16, WINDOWS = 9, MICRO_STEPS = 2 };

static char folder[64]; // temporary, removed at the end
static struct Device device;

// Token i of the one shard: bits of a multiplicative hash, so that no two batches are alike, and tokens repeat. In one
// window none does: its index has as many buckets as there is room for.
static int token(int i) {
    return i / BT == MICRO_STEPS ? 2 * i % V : (int)(((uint32_t)i * 2654435761u >> 8) % V);
}

static void open_loader(DataLoader* loader) {
    char path[96];
    snprintf(path, sizeof(path), "%s/s.bin", folder);
    int32_t header[256] = {TOKEN_FILE_MAGIC, 1, WINDOWS * BT + 1};
    FILE* f = fopen_or_die(path, "wb");
    fwrite_or_die(header, sizeof(header), f, path);
    for (int i = 0; i <= WINDOWS * BT; i++) {
        uint16_t t = (uint16_t)token(i);
        fwrite_or_die(&t, 2, f, path);
    }
    fclose_or_die(f, path);
    DataOptions options = {B, T, 0, 1, V, DATA_IN_ORDER, 42};
    dataloader_open(loader, path, options);
}

// A batch in device memory, filled with what no token is.
static Batch device_batch(void) {
    void* block = device_malloc(&device, batch_bytes(BT));
    memset(block, 0xFF, batch_bytes(BT));
    return batch_at(block, BT);
}

// Is `batch` the window-th of the shard, with an index that groups its rows by token?
static void expect_window(const Batch* batch, TokenIndex index, int window, const char* what) {
    for (int i = 0; i < BT; i++) {
        expect(batch->tokens[i] == token(window * BT + i) && batch->targets[i] == token(window * BT + i + 1),
               "%s: row %d is %d -> %d, want %d -> %d of window %d", what, i, batch->tokens[i], batch->targets[i],
               token(window * BT + i), token(window * BT + i + 1), window);
    }
    expect(index.rows == batch->index.rows && index.bucket_token == batch->index.bucket_token &&
           index.bucket_start == batch->index.bucket_start, "%s: the index is not the device's", what);
    expect(index.num_buckets >= 1 && index.num_buckets <= BT && index.bucket_start[0] == 0 &&
           index.bucket_start[index.num_buckets] == BT, "%s: %d buckets", what, index.num_buckets);
    int last_token = -1, rows = 0;
    for (int k = 0; k < index.num_buckets && index.num_buckets <= BT; k++) {
        expect(index.bucket_token[k] > last_token, "%s: bucket %d of token %d", what, k, index.bucket_token[k]);
        last_token = index.bucket_token[k];
        for (int i = index.bucket_start[k]; i < index.bucket_start[k + 1]; i++, rows++) {
            expect(batch->tokens[index.rows[i]] == last_token, "%s: row %d is not of token %d", what, index.rows[i],
                   last_token);
        }
    }
    expect(rows == BT, "%s: %d rows in the buckets, want %d", what, rows, (int)BT);
}

// Seven steps, more than two turns of the ring; prepares: the next step's first batch is made between them.
static void run_steps(int prepares, int rewinds) {
    DataLoader loader;
    open_loader(&loader);
    BatchRing ring = batch_ring_create(&device, BT, MICRO_STEPS, V, rewinds);
    Batch on_device = device_batch();
    int window = 0;
    for (int step = 0; step < 7; step++) {
        window = rewinds ? 0 : window;
        for (int i = 0; i < MICRO_STEPS; i++) {
            TokenIndex index = batch_ring_next(&ring, &on_device, &loader, i == 0);
            expect_window(&on_device, index, window % WINDOWS, "trained on");
            window++;
            DataPosition at = batch_ring_position(&ring, &loader);
            expect(at.window == (uint64_t)((window - 1) % WINDOWS + 1), "step %d: a checkpoint goes on at window %d, "
                   "want %d", step, (int)at.window, (window - 1) % WINDOWS + 1);
        }
        if (!prepares) { continue; }
        DataPosition before = loader.at;
        batch_ring_ahead(&ring, &loader);
        batch_ring_ahead(&ring, &loader); // it is there already
        DataPosition at = batch_ring_position(&ring, &loader);
        expect(memcmp(&at, &before, sizeof(at)) == 0, "step %d: a checkpoint skips the batch made ahead", step);
        uint64_t taken = rewinds ? 1 : before.window % WINDOWS + 1;
        expect(loader.at.window == taken, "step %d: the loader is at window %d, want %d", step, (int)loader.at.window,
               (int)taken);
    }
    device_release(&device, on_device.tokens);
    batch_ring_free(&ring);
    dataloader_close(&loader);
}

static void test_order(void) { run_steps(0, 0); }
static void test_order_ahead(void) { run_steps(1, 0); }
static void test_rewinds(void) { run_steps(0, 1); }
static void test_rewinds_ahead(void) { run_steps(1, 1); }

// A copy to the device may still be under way while the next batches are made: those of a step, the first one of the
// next and the one that is looked at have pinned memory of their own.
static void test_nobody_overwrites(void) {
    DataLoader loader;
    open_loader(&loader);
    BatchRing ring = batch_ring_create(&device, BT, MICRO_STEPS, V, 0);
    Batch on_device = device_batch();
    batch_ring_look(&ring, &on_device, &loader);
    for (int i = 0; i < MICRO_STEPS; i++) {
        batch_ring_next(&ring, &on_device, &loader, i == 0);
    }
    batch_ring_ahead(&ring, &loader);
    const Batch* in_order[] = {&ring.looked_at, &ring.batch[0], &ring.batch[1], &ring.batch[2]};
    for (int w = 0; w < MICRO_STEPS + 2; w++) {
        expect_window(in_order[w], in_order[w]->index, w, "in pinned memory");
    }
    device_release(&device, on_device.tokens);
    batch_ring_free(&ring);
    dataloader_close(&loader);
}

// Validation and samples between two steps, with the next step's first batch already there.
static void test_looking_changes_nothing(void) {
    DataLoader loader, other;
    open_loader(&loader);
    open_loader(&other);
    BatchRing ring = batch_ring_create(&device, BT, MICRO_STEPS, V, 0);
    Batch on_device = device_batch();
    for (int i = 0; i < MICRO_STEPS; i++) {
        batch_ring_next(&ring, &on_device, &loader, i == 0);
    }
    batch_ring_ahead(&ring, &loader);
    for (int w = 0; w < WINDOWS; w++) {
        TokenIndex index = batch_ring_look(&ring, &on_device, &other);
        expect_window(&on_device, index, w, "looked at");
    }
    const int text[] = {3, 1, 2};
    memset(on_device.tokens, 0xFF, batch_bytes(BT));
    batch_ring_look_at_text(&ring, &on_device, text, 3, 5);
    for (int i = 0; i < 6; i++) {
        int want = i < 3 ? text[i] : i < 5 ? text[2] : -1;
        expect(on_device.tokens[i] == want, "token %d of the text is %d, want %d", i, on_device.tokens[i], want);
    }
    TokenIndex index = batch_ring_next(&ring, &on_device, &loader, 1);
    expect_window(&on_device, index, MICRO_STEPS, "trained on after that");
    device_release(&device, on_device.tokens);
    batch_ring_free(&ring);
    dataloader_close(&loader);
    dataloader_close(&other);
}

int main(void) {
    snprintf(folder, sizeof(folder), "/tmp/test_batch_XXXXXX");
    check(mkdtemp(folder) != NULL, "cannot make a temporary folder");
    unit_run(test_order);
    unit_run(test_order_ahead);
    unit_run(test_rewinds);
    unit_run(test_rewinds_ahead);
    unit_run(test_nobody_overwrites);
    unit_run(test_looking_changes_nothing);
    char command[128];
    snprintf(command, sizeof(command), "rm -rf %s", folder);
    return system(command) != 0 || unit_report();
}
