// Who has which parameters (lib/load.h, lib/state_ranges.h): the section "share" of the files of a checkpoint.
// Everything else in them is sound, so what is looked at here is what follows from lists of ranges that no run has
// written.
//
//     input    1 byte files - 1 (of 3); 1 byte ranks and, with 128, sharded: who loads it; 1 byte which rank of those
//              per file 1 byte pairs (of 32), then 8 bytes each: first, count; a word from 0xfffffff0 on stands for a
//              64-bit number as near to the end
#include "fuzz.h"

#ifndef CPU_FLOOR
#define CPU_FLOOR
#endif
#define LOAD_PIECE ((size_t)4004)
#include "load.h"

struct Comm {
    int rank;
};
struct Device {
    float *begin, *end; // of the arrays
};

int comm_rank(const Comm* comm) { return comm->rank; }
void comm_set_busy(Comm* comm, int is_busy) { (void)comm, (void)is_busy; }
void comm_host_min_max(Comm* comm, int64_t value, int64_t* min, int64_t* max) {
    (void)comm;
    *min = *max = value;
}
void device_sync(Device* dev) { (void)dev; }
void device_copy_out(Device* dev, void* to_host, const void* from_device, size_t bytes) {
    (void)dev;
    memcpy(to_host, from_device, bytes);
}
void device_copy_in(Device* dev, void* to_device, const void* from_host, size_t bytes) {
    fuzz_want((float*)to_device >= dev->begin && bytes <= (size_t)((char*)dev->end - (char*)to_device),
              "%zu bytes are copied past the arrays", bytes);
    memcpy(to_device, from_host, bytes);
}

enum { LOAD_FUZZ_PAIRS = 32, LOAD_FUZZ_FILES = 3 };

static const GptConfig load_fuzz_gpt = {2, 100, 128, 2, 1, 16};

static uint64_t load_fuzz_number(FuzzInput* in) {
    uint32_t word = fuzz_word(in);
    return word < 0xfffffff0u ? word : (uint64_t)(int64_t)(int32_t)word;
}

// The array `which` of parameter i.
static float load_fuzz_value(int which, uint64_t i) { return (float)(3 * i + (uint64_t)which); }

// The file of these shares. What it holds of parameters that there are is right.
static void load_fuzz_file(const char* name, uint64_t pairs[][2], int num_pairs) {
    static float values[16384];
    size_t n = gpt_num_parameters(&load_fuzz_gpt);
    fuzz_want(n <= sizeof(values) / sizeof(values[0]), "%zu parameters", n);
    SnapshotOut out;
    fuzz_want(snapshot_out_open(&out, fuzz_path(name), 0) == 0, "cannot write '%s'", name);
    snapshot_out_begin(&out, "share");
    snapshot_out_append(&out, pairs, (size_t)num_pairs * 16);
    snapshot_out_end(&out);
    SnapshotModelSlice slice;
    memset(&slice, 0, sizeof(slice));
    for (int which = 0; which < 3; which++) {
        slice.first = slice.count = 0;
        snapshot_out_begin(&out, which == 0 ? "master" : which == 1 ? "m" : "v");
        for (int k = 0; k < num_pairs; k++) {
            uint64_t count = pairs[k][1] <= n ? pairs[k][1] : n;
            for (uint64_t i = 0; i < count; i++) {
                values[i] = load_fuzz_value(which, pairs[k][0] + i);
            }
            snapshot_out_append(&out, values, (size_t)count * sizeof(float));
            if (slice.count == 0) { slice.first = pairs[k][0]; }
            slice.count += count;
        }
        snapshot_out_end(&out);
    }
    snapshot_out_begin(&out, "model");
    snapshot_out_append(&out, &slice, sizeof(slice));
    snapshot_out_end(&out);
    ScaleSlot slots[24];
    for (int i = 0; i < 24; i++) {
        scale_slot_init(&slots[i], 448.0f, SLOT_DELAYED);
    }
    snapshot_out_begin(&out, "slots");
    snapshot_out_append(&out, slots, sizeof(slots));
    snapshot_out_end(&out);
    fuzz_want(snapshot_out_close(&out) == 0, "cannot write '%s'", name);
}

static void load_run(const uint8_t* data, size_t size) {
    FuzzInput in = {data, size};
    int num_files = 1 + fuzz_byte(&in) % LOAD_FUZZ_FILES, ranks = fuzz_byte(&in), is_sharded = ranks & 128;
    ranks = 1 + ranks % 128 % 12;
    int rank = fuzz_byte(&in) % ranks;
    size_t n = gpt_num_parameters(&load_fuzz_gpt), elements = n;
    for (int f = 0; f < num_files; f++) {
        uint64_t pairs[LOAD_FUZZ_PAIRS][2];
        int num_pairs = fuzz_byte(&in) % (LOAD_FUZZ_PAIRS + 1);
        for (int k = 0; k < num_pairs; k++) {
            pairs[k][0] = load_fuzz_number(&in);
            pairs[k][1] = load_fuzz_number(&in);
        }
        char name[32];
        snprintf(name, sizeof(name), "shard_%05d.bin", f);
        load_fuzz_file(name, pairs, num_pairs);
    }
    StateRanges keeps = state_ranges_flat(n);
    if (is_sharded) {
        ParameterTable table = parameter_table(load_fuzz_gpt);
        Shards shards = shards_create(&table, ranks);
        state_ranges_free(&keeps);
        keeps = state_ranges_of_shard(&shards, rank);
        elements = shards.shard;
        shards_free(&shards);
    }
    float* all = (float*)calloc_or_die(3 * elements, sizeof(float));
    StateArrays arrays = {all, all + elements, all + 2 * elements};
    struct Device device = {all, all + 3 * elements};
    RunState state;
    memset(&state, 0, sizeof(state));
    run_state_set_shape(&state, &load_fuzz_gpt);
    state.num_ranks = num_files;
    state.num_slots = 24;
    state.amax_history = 16;
    ScaleSlot slots[24];
    char why[WHY_BYTES] = "";
    // as another rank than 0, who looks at model.bin
    int bad = load_checkpoint(&device, 1, &state, fuzz.folder, &arrays, &keeps, slots, why);
    for (int which = 0; !bad && which < 3; which++) {
        const float* array = all + (size_t)which * elements;
        for (int k = 0; k < keeps.num; k++) {
            for (size_t i = 0; i < keeps.range[k].count; i++) {
                float found = array[keeps.range[k].at + i], want = load_fuzz_value(which, keeps.range[k].first + i);
                fuzz_want(found == want, "parameter %zu of array %d is %g, want %g", keeps.range[k].first + i, which,
                          (double)found, (double)want);
            }
        }
    }
    free(all);
    state_ranges_free(&keeps);
    for (int f = 0; f < num_files; f++) {
        char name[32];
        snprintf(name, sizeof(name), "shard_%05d.bin", f);
        unlink(fuzz_path(name));
    }
    if (bad) { fuzz_refused(why); }
}

// Seeds: what runs of 1 to 3 ranks write, for ranks of every kind; the same with one number changed.
static void load_seeds(void) {
    ParameterTable table = parameter_table(load_fuzz_gpt);
    for (int layout = 0; layout < 2 * LOAD_FUZZ_FILES; layout++) {
        int num_files = 1 + layout / 2;
        Shards shards = shards_create(&table, num_files);
        uint8_t bytes[3 + LOAD_FUZZ_FILES * (1 + 8 * LOAD_FUZZ_PAIRS)];
        bytes[0] = (uint8_t)(num_files - 1);
        size_t size = 3;
        for (int f = 0; f < num_files; f++) {
            StateRanges ranges = layout % 2 ? state_ranges_of_shard(&shards, f)
                                            : state_ranges_share(table.num_parameters, f, num_files);
            bytes[size++] = (uint8_t)ranges.num;
            for (int k = 0; k < ranges.num; k++) {
                uint32_t pair[2] = {(uint32_t)ranges.range[k].first, (uint32_t)ranges.range[k].count};
                memcpy(bytes + size, pair, 8);
                size += 8;
            }
            state_ranges_free(&ranges);
        }
        shards_free(&shards);
        static const uint8_t loaders[][2] = {{0, 0}, {128, 0}, {129, 1}, {130, 2}, {136, 8}};
        for (size_t i = 0; i < sizeof(loaders) / sizeof(loaders[0]); i++) {
            memcpy(bytes + 1, loaders[i], 2);
            fuzz_seed(FUZZ_TAKEN, bytes, size, "", 0);
        }
        static const uint32_t changes[] = {1, 0xffffffff, 0xfffffff0, 0x80000000};
        for (size_t i = 0; i < sizeof(changes) / sizeof(changes[0]); i++) {
            for (int place = 4; place <= 8; place += 4) { // first and count of the first range
                uint32_t word;
                memcpy(&word, bytes + place, 4);
                word += changes[i];
                uint8_t kept[4];
                memcpy(kept, bytes + place, 4);
                memcpy(bytes + place, &word, 4);
                fuzz_seed(FUZZ_REFUSED, bytes, size, "", 0);
                memcpy(bytes + place, kept, 4);
            }
        }
    }
}

FUZZ_TARGET(load)
