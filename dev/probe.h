// One floor of ops as the tests see it: probe_floor, a table of functions that run an op or a training session on
// buffers of the host. Included right after train_gpt_fp8.cu, once per floor (inside namespace cpu, and for the GPU at
// global scope), so there is no guard.

// ---------------------------------------------------------------------------------------------------------------------
// single ops

#define PROBE_GUARD 512   // bytes in front of and behind every buffer that nobody may write
#define PROBE_FILLER 0xA5 // what they hold

// A buffer on the device between two guard zones. Without guards (TEST_NO_GUARDS set) the buffer is an allocation of
// its own, so that compute-sanitizer sees every access beyond it.
typedef struct {
    char* block; // device
    char* image; // host copy of the whole block
    size_t guard, bytes;
} ProbeBuffer;

static void probe_buffer_open(Device* dev, ProbeBuffer* b, size_t bytes, int filler) {
    b->guard = getenv("TEST_NO_GUARDS") == NULL ? PROBE_GUARD : 0;
    b->bytes = bytes;
    b->block = (char*)device_malloc(dev, bytes + 2 * b->guard + (bytes == 0));
    b->image = (char*)malloc_or_die(bytes + 2 * b->guard);
    memset(b->image, PROBE_FILLER, bytes + 2 * b->guard);
    memset(b->image + b->guard, filler, bytes);
}

static void probe_buffer_upload(Device* dev, ProbeBuffer* b) {
    device_copy_in(dev, b->block, b->image, b->bytes + 2 * b->guard);
}

// Reads the block back and looks at its guards; returns 0 when one was written to.
static int probe_buffer_download(Device* dev, ProbeBuffer* b) {
    device_copy_out(dev, b->image, b->block, b->bytes + 2 * b->guard);
    for (size_t i = 0; i < b->guard; i++) {
        if ((uint8_t)b->image[i] != PROBE_FILLER || (uint8_t)b->image[b->guard + b->bytes + i] != PROBE_FILLER) {
            return 0;
        }
    }
    return 1;
}

static void probe_buffer_close(Device* dev, ProbeBuffer* b) {
    device_release(dev, b->block);
    free(b->image);
}

static size_t probe_arg_bytes(const Arg* arg) {
    return arg->n * (arg->type == ARG_BF16 ? sizeof(bf16) : arg_element_bytes(arg->type));
}

// Host values to the bytes that the floor stores, and back.
static void probe_to_image(char* image, const Arg* arg) {
    if (arg->type == ARG_BF16 && sizeof(bf16) == 2) {
        for (size_t i = 0; i < arg->n; i++) {
            uint16_t bits = (uint16_t)(float_bits(((const float*)arg->host)[i]) >> 16);
            memcpy(image + 2 * i, &bits, 2);
        }
    } else {
        memcpy(image, arg->host, probe_arg_bytes(arg));
    }
}

static void probe_from_image(const Arg* arg, const char* image) {
    if (arg->type == ARG_BF16 && sizeof(bf16) == 2) {
        for (size_t i = 0; i < arg->n; i++) {
            uint16_t bits;
            memcpy(&bits, image + 2 * i, 2);
            ((float*)arg->host)[i] = bits_float((uint32_t)bits << 16);
        }
    } else {
        memcpy(arg->host, image, probe_arg_bytes(arg));
    }
}

typedef struct {
    const OpCall* call;
    void* address[MAX_ARGS];
} ProbeArgs;

// Device address of the argument `name`, NULL when the call leaves it out.
static void* probe_at(const ProbeArgs* args, const char* name) {
    for (int i = 0; i < args->call->num_args; i++) {
        if (strcmp(args->call->arg[i].name, name) == 0) { return args->address[i]; }
    }
    return NULL;
}

#define PROBE_F32(name) ((float*)probe_at(a, name))
#define PROBE_BF16(name) ((bf16*)probe_at(a, name))
#define PROBE_INT(name) ((int*)probe_at(a, name))

// The tensor whose forms are the arguments <prefix>wide, <prefix>data, <prefix>transposed, <prefix>slot.
static void* probe_form(const ProbeArgs* a, const char* prefix, const char* form) {
    char name[64];
    snprintf(name, sizeof(name), "%s%s", prefix, form);
    return probe_at(a, name);
}

static E4m3Tensor probe_e4m3(const ProbeArgs* a, const char* prefix) {
    const OpCall* c = a->call;
    E4m3Tensor t = {(bf16*)probe_form(a, prefix, "wide"),
                    (e4m3*)probe_form(a, prefix, "data"),
                    (e4m3*)probe_form(a, prefix, "transposed"),
                    (ScaleSlot*)probe_form(a, prefix, "slot"),
                    c->recipe,
                    c->measure_first,
                    c->record};
    return t;
}

static E5m2Tensor probe_e5m2(const ProbeArgs* a, const char* prefix) {
    const OpCall* c = a->call;
    E5m2Tensor t = {(bf16*)probe_form(a, prefix, "wide"),
                    (e5m2*)probe_form(a, prefix, "data"),
                    (e5m2*)probe_form(a, prefix, "transposed"),
                    (ScaleSlot*)probe_form(a, prefix, "slot"),
                    c->recipe,
                    c->measure_first,
                    c->record};
    return t;
}

// The scratch that the op may ask for by the contract, and no more.
static size_t probe_workspace_bytes(Device* dev, const OpCall* c) {
    switch (c->op) {
    case OP_MATMUL_FORWARD:
    case OP_MATMUL_DGRAD:
    case OP_MATMUL_WGRAD:
        return matmul_workspace_bytes();
    case OP_ATTENTION_FORWARD:
    case OP_ATTENTION_BACKWARD:
        return attention_workspace_bytes(dev, c->B, c->T, c->NH, c->HS);
    default:
        return reduction_workspace_bytes(dev, c->C > c->cols ? c->C : c->cols);
    }
}

static ParamState probe_param_state(const ProbeArgs* a) {
    const OpCall* c = a->call;
    ParamState p = {PROBE_F32("master"),
                    PROBE_F32("m"),
                    PROBE_F32("v"),
                    PROBE_F32("grad"),
                    PROBE_BF16("param"),
                    (ScaleSlot*)probe_at(a, "slots"),
                    c->slot_stride,
                    c->layers,
                    c->n,
                    c->index};
    return p;
}

static AdamW probe_adamw(const OpCall* c) {
    AdamW adamw = {c->lr, c->beta1, c->beta2, c->eps, c->weight_decay, c->grad_clip, c->t, c->stochastic, c->seed};
    return adamw;
}

// Ops between the embedding and the classifier that make or read tensors by rows.
static void probe_call_layer_op(Device* dev, const ProbeArgs* a) {
    const OpCall* c = a->call;
    LayerNormStats stats = {PROBE_F32("mean"), PROBE_F32("rstd")};
    switch (c->op) {
    case OP_LAYERNORM_FORWARD: {
        ResidualAdd add = {PROBE_BF16("sum"), PROBE_BF16("in"), PROBE_BF16("branch"), PROBE_BF16("branch_bias")};
        layernorm_forward(dev, probe_e4m3(a, ""), stats, add, PROBE_BF16("weight"), PROBE_BF16("bias"), c->rows, c->C);
        break;
    }
    case OP_LAYERNORM_BACKWARD: {
        LayerNormBackward args = {probe_e5m2(a, ""),
                                  PROBE_F32("dweight"),
                                  PROBE_F32("dbias"),
                                  PROBE_F32("dbranch_bias"),
                                  PROBE_BF16("dy"),
                                  PROBE_BF16("dresidual"),
                                  PROBE_BF16("x"),
                                  stats,
                                  PROBE_BF16("weight"),
                                  c->rows,
                                  c->C};
        layernorm_backward(dev, args);
        break;
    }
    case OP_MATMUL_FORWARD:
        matmul_forward(dev, PROBE_BF16("y"), probe_e4m3(a, "x_"), probe_e4m3(a, "w_"), PROBE_BF16("bias"), c->rows,
                       c->C, c->OC);
        break;
    case OP_MATMUL_DGRAD:
        matmul_dgrad(dev, PROBE_BF16("dx"), probe_e5m2(a, "dy_"), probe_e4m3(a, "w_"), c->rows, c->C, c->OC);
        break;
    case OP_MATMUL_WGRAD:
        matmul_wgrad(dev, PROBE_F32("dw"), probe_e5m2(a, "dy_"), probe_e4m3(a, "x_"), c->accumulate, c->rows,
                     c->C, c->OC);
        break;
    case OP_ATTENTION_FORWARD:
        attention_forward(dev, probe_e4m3(a, ""), PROBE_F32("lse"), PROBE_BF16("qkv"), c->B, c->T, c->NH, c->HS);
        break;
    case OP_ATTENTION_BACKWARD:
        attention_backward(dev, probe_e5m2(a, ""), PROBE_F32("dbias"), PROBE_BF16("dout"), PROBE_BF16("out"),
                           PROBE_F32("lse"), PROBE_BF16("qkv"), c->B, c->T, c->NH, c->HS);
        break;
    case OP_GELU_FORWARD:
        gelu_forward(dev, probe_e4m3(a, ""), PROBE_BF16("x"), PROBE_BF16("bias"), c->rows, c->C);
        break;
    case OP_GELU_BACKWARD:
        gelu_backward(dev, probe_e5m2(a, ""), PROBE_F32("dbias"), PROBE_BF16("dy"), PROBE_BF16("x"), PROBE_BF16("bias"),
                      c->rows, c->C);
        break;
    default:
        check(0, "test: op %d is not here", (int)c->op);
    }
}

// The pieces of the bucket as param_pack and param_unpack want them, in device memory; released by the caller.
static ParamPiece* probe_param_pieces(Device* dev, const ProbeArgs* a) {
    const Bucket* bucket = a->call->bucket;
    ParamPiece pieces[BUCKET_PIECES];
    for (int p = 0; p < bucket->num_pieces; p++) {
        const Piece* piece = &bucket->piece[p];
        ParamPiece param = {PROBE_BF16("params") + piece->offset, piece->n, piece->slice, piece->at};
        pieces[p] = param;
    }
    ParamPiece* there = (ParamPiece*)device_malloc(dev, sizeof(pieces));
    device_copy_in(dev, there, pieces, (size_t)bucket->num_pieces * sizeof(ParamPiece));
    device_sync(dev);
    return there;
}

// Ops between ranks.
static void probe_call_exchange_op(Device* dev, const ProbeArgs* a) {
    const OpCall* c = a->call;
    switch (c->op) {
    case OP_GRAD_QUANTIZE:
        grad_quantize(dev, (uint8_t*)probe_at(a, "send"), PROBE_F32("grads"), c->bucket, c->num_ranks);
        break;
    case OP_GRAD_SUM:
        grad_sum(dev, PROBE_F32("grads"), (uint8_t*)probe_at(a, "received"), c->bucket, c->num_ranks, c->rank);
        break;
    case OP_GRAD_PACK_BF16:
        grad_pack_bf16(dev, PROBE_BF16("packed"), PROBE_F32("grads"), c->bucket, c->rank, c->num_ranks);
        break;
    case OP_GRAD_PACK_FP32:
        grad_pack_fp32(dev, PROBE_F32("packed"), PROBE_F32("grads"), c->bucket, c->rank, c->num_ranks);
        break;
    case OP_GRAD_UNPACK_BF16:
        grad_unpack_bf16(dev, PROBE_F32("grads"), PROBE_BF16("chunks"), c->bucket, c->rank, c->num_ranks);
        break;
    case OP_GRAD_UNPACK_FP32:
        grad_unpack_fp32(dev, PROBE_F32("grads"), PROBE_F32("chunks"), c->bucket, c->rank, c->num_ranks);
        break;
    case OP_GRAD_AMAX:
        grad_amax(dev, PROBE_F32("amaxes"), PROBE_F32("grads"), c->bucket);
        break;
    case OP_GRAD_QUANTIZE_SHARED:
        grad_quantize_shared(dev, (e4m3*)probe_at(a, "codes"), PROBE_F32("grads"), c->bucket, PROBE_F32("amaxes"),
                             c->factor, c->num_ranks);
        break;
    case OP_GRAD_DEQUANTIZE_SHARED:
        grad_dequantize_shared(dev, PROBE_F32("grads"), (e4m3*)probe_at(a, "codes"), c->bucket, PROBE_F32("amaxes"),
                               c->factor, c->num_ranks, (unsigned long long*)probe_at(a, "saturated"));
        break;
    case OP_PARAM_PACK:
    case OP_PARAM_UNPACK: {
        ParamPiece* pieces = probe_param_pieces(dev, a);
        int num_pieces = c->bucket->num_pieces;
        if (c->op == OP_PARAM_PACK) {
            param_pack(dev, PROBE_BF16("packed"), pieces, num_pieces, c->bucket->chunk, c->rank);
        } else {
            param_unpack(dev, pieces, PROBE_BF16("gathered"), num_pieces, c->bucket->chunk, c->num_ranks);
        }
        device_sync(dev);
        device_release(dev, pieces);
        break;
    }
    case OP_QUANTIZE_SLICE:
        quantize_slice(dev, (e4m3*)probe_at(a, "data"), (ScaleSlot*)probe_at(a, "slot"), PROBE_F32("master"), c->n);
        break;
    case OP_TRANSPOSE_WEIGHT:
        transpose_weight(dev, (e4m3*)probe_at(a, "transposed"), (e4m3*)probe_at(a, "data"), c->OC, c->C);
        break;
    default:
        probe_call_layer_op(dev, a);
    }
}

static void probe_call(Device* dev, const ProbeArgs* a) {
    const OpCall* c = a->call;
    switch (c->op) {
    case OP_EMBEDDING_FORWARD:
        embedding_forward(dev, PROBE_BF16("out"), PROBE_INT("tokens"), PROBE_BF16("wte"), PROBE_BF16("wpe"), c->B, c->T,
                          c->C);
        break;
    case OP_EMBEDDING_BACKWARD: {
        TokenIndex index = {PROBE_INT("index_rows"), PROBE_INT("bucket_token"), PROBE_INT("bucket_start"),
                            c->num_buckets};
        embedding_backward(dev, PROBE_F32("dwte"), PROBE_F32("dwpe"), PROBE_BF16("dout"), index, c->B, c->T, c->C);
        break;
    }
    case OP_QUANTIZE_FORWARD:
        quantize_forward(dev, probe_e4m3(a, ""), c->rows, c->cols);
        break;
    case OP_QUANTIZE_BACKWARD:
        quantize_backward(dev, probe_e5m2(a, ""), PROBE_F32("dbias"), c->rows, c->cols);
        break;
    case OP_QUANTIZE_WEIGHT:
        quantize_weight(dev, probe_e4m3(a, ""), PROBE_F32("master"), c->OC, c->C);
        break;
    case OP_CLASSIFIER:
        classifier(dev, probe_e5m2(a, ""), PROBE_F32("losses"), PROBE_BF16("logits"), PROBE_INT("targets"),
                   c->factor, c->with_gradient, c->rows, c->V, c->Vp);
        break;
    case OP_LOSS_ADD:
        loss_add(dev, (StepState*)probe_at(a, "state"), PROBE_F32("losses"), c->factor, c->n);
        break;
    case OP_GLOBAL_NORM:
        global_norm(dev, (StepState*)probe_at(a, "state"), PROBE_F32("grads"), c->n);
        break;
    case OP_NORM_OF_SLICES:
        norm_of_slices(dev, (RankNorm*)probe_at(a, "part"), (StepState*)probe_at(a, "state"), PROBE_F32("grads"),
                       c->shards, c->rank);
        break;
    case OP_NORM_OF_RANKS:
        norm_of_ranks(dev, (StepState*)probe_at(a, "state"), (RankNorm*)probe_at(a, "parts"), c->num_ranks);
        break;
    case OP_ADAMW_UPDATE:
        adamw_update(dev, probe_param_state(a), probe_adamw(c), (StepState*)probe_at(a, "state"));
        break;
    case OP_PARAMS_FROM_MASTER:
        params_from_master(dev, probe_param_state(a), probe_adamw(c));
        break;
    case OP_SCALE_SLOTS_GATHER:
        scale_slots_gather(dev, PROBE_F32("amaxes"), (ScaleSlot*)probe_at(a, "slots"), c->num_slots);
        break;
    case OP_SCALE_SLOTS_STEP:
        scale_slots_step(dev, (ScaleSlot*)probe_at(a, "slots"), PROBE_F32("amaxes"), c->num_slots, c->recipe,
                         (StepState*)probe_at(a, "state"));
        break;
    case OP_BF16_ROUND_TRIP: { // values (n) floats of the host -> stored, bf16 -> floats of the host -> returned
        const Arg* values = arg_find(c, "values");
        float* host = (float*)malloc_or_die(values->n * sizeof(float));
        bf16_from_host(dev, PROBE_BF16("stored"), (const float*)values->host, values->n);
        bf16_to_host(dev, host, PROBE_BF16("stored"), values->n);
        device_copy_in(dev, PROBE_F32("returned"), host, values->n * sizeof(float));
        device_sync(dev);
        free(host);
        break;
    }
    default:
        probe_call_exchange_op(dev, a);
    }
}

static void probe_op(void* device, OpCall* call) {
    static_assert(sizeof(HostState) == sizeof(StepState), "the words of a StepState");
    static_assert(sizeof(HostNorm) == sizeof(RankNorm), "the words of a RankNorm");
    Device* dev = (Device*)device;
    ProbeBuffer buffer[MAX_ARGS], workspace;
    ProbeArgs args;
    args.call = call;
    call->broken[0] = 0;
    for (int i = 0; i < call->num_args; i++) {
        const Arg* arg = &call->arg[i];
        if (arg->alias != NULL) { continue; }
        probe_buffer_open(dev, &buffer[i], probe_arg_bytes(arg), 0xFF);
        if (arg->role != ARG_OUT) { probe_to_image(buffer[i].image + buffer[i].guard, arg); }
        probe_buffer_upload(dev, &buffer[i]);
        args.address[i] = buffer[i].block + buffer[i].guard;
    }
    for (int i = 0; i < call->num_args; i++) {
        if (call->arg[i].alias != NULL) { args.address[i] = probe_at(&args, call->arg[i].alias); }
    }
    size_t workspace_bytes = probe_workspace_bytes(dev, call);
    probe_buffer_open(dev, &workspace, workspace_bytes, 0xFF);
    probe_buffer_upload(dev, &workspace);
    device_set_workspace(dev, workspace.block + workspace.guard, workspace_bytes);

    probe_call(dev, &args);
    device_sync(dev);

    for (int i = 0; i < call->num_args; i++) {
        const Arg* arg = &call->arg[i];
        if (arg->alias != NULL) { continue; }
        char* content = buffer[i].image + buffer[i].guard;
        if (!probe_buffer_download(dev, &buffer[i])) {
            snprintf(call->broken, sizeof(call->broken), "wrote outside %s", arg->name);
        }
        if (arg->role != ARG_IN) {
            probe_from_image(arg, content);
        } else if (arg->type != ARG_BF16 && memcmp(content, arg->host, buffer[i].bytes) != 0) {
            snprintf(call->broken, sizeof(call->broken), "wrote to its input %s", arg->name);
        }
        probe_buffer_close(dev, &buffer[i]);
    }
    if (!probe_buffer_download(dev, &workspace)) {
        snprintf(call->broken, sizeof(call->broken), "overran its workspace");
    }
    device_set_workspace(dev, NULL, 0);
    probe_buffer_close(dev, &workspace);
}

static void* probe_device_open(int num_threads, int attention) {
    DeviceOptions options = {0, num_threads, 0, (AttentionKind)attention};
    return device_create(options);
}

static void probe_device_close(void* device) {
    device_free((Device*)device);
}
static const char* probe_attention_name(const void* device) {
    return device_attention_name((const Device*)device);
}

// ---------------------------------------------------------------------------------------------------------------------
// training sessions: the program's own functions, fed from memory

typedef struct {
    Device* dev;
    Comm* comm;
    char text[1024]; // the flags; settings point into it
    TrainConfig train;
    GptConfig config;
    Model model;
    Run run;
    int steps_done;
    char shard[256];
} Session;

// A shard in llm.c's format in a temporary file.
static void probe_write_shard(char* path, size_t path_bytes, const int* tokens, int num_tokens) {
    const char* folder = getenv("TMPDIR");
    snprintf(path, path_bytes, "%s/test_gpt_fp8_XXXXXX", folder != NULL ? folder : "/tmp");
    int descriptor = mkstemp(path);
    check(descriptor >= 0, "cannot create '%s': %s", path, strerror(errno));
    FILE* f = fdopen(descriptor, "wb");
    check(f != NULL, "cannot write '%s': %s", path, strerror(errno));
    int header[256] = {TOKEN_FILE_MAGIC, 1, num_tokens};
    fwrite_or_die(header, sizeof(header), f, path);
    for (int i = 0; i < num_tokens; i++) {
        uint16_t token = (uint16_t)tokens[i];
        fwrite_or_die(&token, sizeof(token), f, path);
    }
    fclose_or_die(f, path);
}

static void* probe_session(const char* flags, const float* weights, const int* tokens, int num_tokens, int num_threads,
                           int device) {
    Session* s = (Session*)calloc_or_die(1, sizeof(Session));
    probe_write_shard(s->shard, sizeof(s->shard), tokens, num_tokens);
    char* argv[64] = {(char*)"test_gpt_fp8", (char*)"--train-data", s->shard, (char*)"--autotune", (char*)"off"};
    int argc = 5;
    snprintf(s->text, sizeof(s->text), "%s", flags);
    for (char* word = strtok(s->text, " "); word != NULL; word = strtok(NULL, " ")) {
        check(argc < 64, "test: too many flags in '%s'", flags);
        argv[argc++] = word;
    }
    config_parse(&s->train, &s->config, argc, argv);
    char** arguments = argv;
    int saved = quiet_begin();
    s->comm = comm_create(&argc, &arguments);
    config_finish(&s->train, &s->config, comm_num_ranks(s->comm), comm_rank(s->comm));
    DeviceOptions options = {device, num_threads, s->train.precision == PRECISION_FP32,
                             (AttentionKind)s->train.attention};
    s->dev = device_create(options);
    comm_connect(s->comm, s->dev);
    set_matmul(s->dev, &s->train);
    model_create(&s->model, s->dev, s->comm, s->config, &s->train);
    model_set_weights(&s->model, weights);
    quiet_end(saved);
    DataOptions data = {s->train.batch_size,      s->train.seq_len, comm_rank(s->comm), comm_num_ranks(s->comm),
                        s->config.vocab_size, DATA_IN_ORDER,    42};
    dataloader_open(&s->run.train_loader, s->shard, data);
    dataloader_open(&s->run.val_loader, s->shard, data);
    s->run.has_train = s->run.has_val = 1;
    save_open(&s->run.save, s->dev, s->comm, &s->run.logger, &s->train, state_ranges(&s->model, 1));
    return s;
}

static void* probe_open(const char* flags, const float* weights, const int* tokens, int num_tokens, int num_threads) {
    return probe_session(flags, weights, tokens, num_tokens, num_threads, 0);
}

// MPI runs already. That it should be used, comm_create reads off the launcher's variables, which main has taken away.
static void* probe_open_rank(const char* flags, const float* weights, const int* tokens, int num_tokens, int num_ranks,
                             int device) {
    char count[16];
    snprintf(count, sizeof(count), "%d", num_ranks);
    setenv("OMPI_COMM_WORLD_SIZE", count, 1);
    void* session = probe_session(flags, weights, tokens, num_tokens, 1, device);
    unsetenv("OMPI_COMM_WORLD_SIZE");
    check(comm_num_ranks(((Session*)session)->comm) == num_ranks, "test: a session of %d ranks, want %d",
          comm_num_ranks(((Session*)session)->comm), num_ranks);
    return session;
}

static void probe_close(void* session) {
    Session* s = (Session*)session;
    save_free(&s->run.save);
    dataloader_close(&s->run.train_loader);
    dataloader_close(&s->run.val_loader);
    unlink(s->shard);
    model_free(&s->model);
    comm_free(s->comm);
    device_free(s->dev);
    free(s);
}

static HostStep probe_step(void* session, float learning_rate) {
    Session* s = (Session*)session;
    StepReport report;
    memset(&report, 0, sizeof(report));
    StepVerdict verdict =
        train_step(&s->model, &s->run.train_loader, learning_rate, 1, &s->run.loss_outliers, &s->run.norm_outliers,
                   &report);
    s->steps_done++;
    HostStep step = {report.loss, report.grad_norm, (int)verdict, s->model.slots_warming};
    return step;
}

static float probe_validate(void* session, int num_batches) {
    Session* s = (Session*)session;
    return validate(&s->model, &s->run.val_loader, num_batches);
}

static void probe_forward(void* session, float* logits, float* losses) {
    Session* s = (Session*)session;
    Model* model = &s->model;
    int BT = model->B * model->T, V = s->config.vocab_size, Vp = s->config.padded_vocab_size;
    check(model->head_rows >= BT, "test: logits of %d rows, %d are kept", BT, model->head_rows);
    dataloader_rewind(&s->run.val_loader);
    set_scaling(model, model->slots_warming > 0, 0);
    batch_ring_look(&model->batches, &model->batch, &s->run.val_loader);
    gpt_forward(model, model->batch.tokens, model->B, model->T);
    gpt_loss(model, model->batch.targets, 0.0f, 0, BT);
    if (losses != NULL) { device_copy_out(s->dev, losses, model->losses, (size_t)BT * sizeof(float)); }
    for (int row = 0; logits != NULL && row < BT; row++) {
        bf16_to_host(s->dev, logits + (size_t)row * V, model->scratch.logits + (size_t)row * Vp, (size_t)V);
    }
}

static void probe_grads(void* session, float* grads) {
    Session* s = (Session*)session;
    device_copy_out(s->dev, grads, s->model.grads, s->model.table.num_parameters * sizeof(float));
}

static void probe_weights(void* session, float* master, float* m, float* v) {
    Model* model = &((Session*)session)->model;
    const float* from[] = {model->master, model->m, model->v};
    float* to[] = {master, m, v};
    for (int i = 0; i < 3; i++) {
        if (to[i] == NULL) { continue; }
        float* values = collect_state(model, from[i]);
        if (values != NULL) { memcpy(to[i], values, model->table.num_parameters * sizeof(float)); }
        free(values);
    }
}

static int probe_slots(void* session, ScaleSlot* slots) {
    Session* s = (Session*)session;
    if (slots != NULL) {
        device_copy_out(s->dev, slots, s->model.slots, (size_t)s->model.num_slots * sizeof(ScaleSlot));
    }
    return s->model.num_slots;
}

static void probe_set_weights(void* session, const float* weights) {
    model_set_weights(&((Session*)session)->model, weights);
}

static int probe_save(void* session, const char* folder) {
    Session* s = (Session*)session;
    s->train.output_dir = folder;
    int saved = quiet_begin();
    begin_checkpoint(&s->run, &s->model, s->steps_done);
    save_poll(&s->run.save, 1);
    quiet_end(saved);
    s->train.output_dir = "";
    return s->run.save.newest == s->steps_done;
}

static int probe_load(void* session, const char* folder) {
    Session* s = (Session*)session;
    Resume resume;
    s->train.resume = folder;
    // the shard is a temporary file: another name, but the same data
    int saved = quiet_begin();
    resume_find(&resume, &s->train, 0);
    resume_open(&resume);
    resume.state.data_fingerprint = run_data_fingerprint(&s->run.train_loader);
    resume_run(&s->run, &s->model, &resume);
    quiet_end(saved);
    resume_free(&resume);
    return s->steps_done = s->run.first_step;
}

static float probe_poke(void* session, int tensor, size_t i, float value) {
    Session* s = (Session*)session;
    float before;
    bf16* place = s->model.params[tensor] + i;
    bf16_to_host(s->dev, &before, place, 1);
    bf16_from_host(s->dev, place, &value, 1);
    return before;
}

static void probe_launch_early(void* session, int on) {
#ifdef CPU_FLOOR
    (void)session, (void)on;
#else
    ((Session*)session)->dev->early_launch = on;
#endif
}

// The backward pass of one micro-batch, nothing exchanged.
static void probe_local_grads(void* session, float* grads) {
    Session* s = (Session*)session;
    Model* model = &s->model;
    int B = model->B, T = model->T;
    zero_small_gradients(model);
    set_scaling(model, model->slots_warming > 0, 1);
    model->accumulate = 0;
    TokenIndex index = batch_ring_look(&model->batches, &model->batch, &s->run.train_loader);
    gpt_forward(model, model->batch.tokens, B, T);
    gpt_loss(model, model->batch.targets, loss_weight(model), 1, B * T);
    gpt_backward(model, index, 0, B, T);
    probe_grads(session, grads);
}

// The buffers of the exchange hold NaN, so that what was not sent, or not waited for, is seen.
static void probe_reduce(void* session, float* grads) {
    Session* s = (Session*)session;
    Exchange* x = &s->model.exchange;
    char* poison = (char*)malloc_or_die(x->pool_bytes);
    memset(poison, 0xFF, x->pool_bytes);
    device_copy_in(s->dev, x->pool, poison, x->pool_bytes);
    device_copy_in(s->dev, s->model.grads, grads, s->model.table.num_parameters * sizeof(float));
    device_zero(s->dev, s->model.state, sizeof(StepState));
    for (int l = 0; l <= s->config.num_layers; l++) {
        exchange_bucket(x, s->model.grads);
    }
    exchange_finish(x, s->model.grads);
    probe_grads(session, grads);
    free(poison);
}

static HostState probe_norm(void* session, const float* grads, float loss) {
    Session* s = (Session*)session;
    StepState state;
    memset(&state, 0, sizeof(state));
    state.loss = loss;
    device_copy_in(s->dev, s->model.grads, grads, s->model.table.num_parameters * sizeof(float));
    device_copy_in(s->dev, s->model.state, &state, sizeof(state));
    device_sync(s->dev);
    exchange_norm(&s->model.exchange, s->model.state, s->model.grads, s->model.table.num_parameters);
    state = read_state(&s->model);
    HostState told = {state.loss, state.grad_norm, state.skip, state.slots_warming, state.saturated};
    return told;
}

static void probe_set_state(void* session, const float* master, const float* m, const float* v) {
    Model* model = &((Session*)session)->model;
    StateRanges ranges = state_ranges(model, 0);
    load_from_host(model->dev, model->master, &ranges, master);
    load_from_host(model->dev, model->m, &ranges, m);
    load_from_host(model->dev, model->v, &ranges, v);
    state_ranges_free(&ranges);
}

static void probe_settle(void* session) {
    Model* model = &((Session*)session)->model;
    want_weights(model, model->config.num_layers);
    device_sync(model->dev);
}

static uint64_t probe_hash(Device* dev, uint64_t hash, const void* p, size_t bytes) {
    if (p == NULL) { return hash; }
    void* host = malloc_or_die(bytes);
    device_copy_out(dev, host, p, bytes);
    hash = config_fnv1a(hash, host, bytes);
    free(host);
    return hash;
}

static uint64_t probe_state_hash(void* session) {
    Model* model = &((Session*)session)->model;
    size_t bytes = state_elements(model) * sizeof(float);
    uint64_t hash = probe_hash(model->dev, 0xcbf29ce484222325ull, model->master, bytes);
    return probe_hash(model->dev, probe_hash(model->dev, hash, model->m, bytes), model->v, bytes);
}

static uint64_t probe_weight_hash(Device* dev, uint64_t hash, const E4m3Tensor* w, size_t n) {
    hash = probe_hash(dev, hash, w->wide, n * sizeof(bf16));
    hash = probe_hash(dev, probe_hash(dev, hash, w->data, n), w->transposed, n);
    if (w->slot == NULL) { return hash; }
    ScaleSlot slot;
    device_copy_out(dev, &slot, w->slot, sizeof(slot));
    hash = config_fnv1a(hash, &slot.scale, sizeof(slot.scale));
    return config_fnv1a(hash, &slot.descale, sizeof(slot.descale));
}

static uint64_t probe_weights_hash(void* session) {
    Model* model = &((Session*)session)->model;
    uint64_t hash = 0xcbf29ce484222325ull;
    for (int t = 0; t < NUM_TENSORS; t++) {
        const TensorSpec* spec = &model->table.tensor[t];
        if (!spec->is_linear) {
            hash = probe_hash(model->dev, hash, model->params[t], spec->layers * spec->n * sizeof(bf16));
        }
    }
    for (int l = 0; l < model->config.num_layers; l++) {
        for (int k = 0; k < NUM_LINEARS; k++) {
            hash = probe_weight_hash(model->dev, hash, &model->w[l].w[k],
                                     model->table.tensor[linear_weight_tensor[k]].n);
        }
    }
    return probe_weight_hash(model->dev, hash, &model->head.w, model->table.tensor[TENSOR_WTE].n);
}

static void probe_param(void* session, int tensor, float* values) {
    Model* model = &((Session*)session)->model;
    const TensorSpec* spec = &model->table.tensor[tensor];
    bf16_to_host(model->dev, values, model->params[tensor], spec->layers * spec->n);
}

static int probe_weight(void* session, int layer, int linear, uint8_t* data, uint8_t* transposed, float* wide) {
    Model* model = &((Session*)session)->model;
    int is_head = layer == model->config.num_layers;
    const E4m3Tensor* w = is_head ? &model->head.w : &model->w[layer].w[linear];
    size_t n = model->table.tensor[is_head ? TENSOR_WTE : linear_weight_tensor[linear]].n;
    if (w->data == NULL) {
        bf16_to_host(model->dev, wide, w->wide, n);
        return 0;
    }
    device_copy_out(model->dev, data, w->data, n);
    device_copy_out(model->dev, transposed, w->transposed, n);
    return 1;
}

#ifdef CPU_FLOOR
#define PROBE_FLOOR_NAME "CPU"
#else
#define PROBE_FLOOR_NAME "GPU"
#endif

static const Floor probe_floor = {PROBE_FLOOR_NAME, probe_device_open, probe_device_close, probe_attention_name,
                                  probe_op,         probe_open,        probe_close,        probe_step,
                                  probe_validate,   probe_forward,     probe_grads,        probe_weights,
                                  probe_slots,      probe_set_weights, probe_poke,        probe_launch_early,
                                  probe_save,       probe_load,        probe_open_rank,   probe_local_grads,
                                  probe_reduce,     probe_norm,        probe_set_state,   probe_settle,
                                  probe_state_hash, probe_weights_hash, probe_param,      probe_weight};

#undef PROBE_FLOOR_NAME
#undef PROBE_GUARD
#undef PROBE_FILLER
#undef PROBE_F32
#undef PROBE_BF16
#undef PROBE_INT
