/* test_documents.h: --doc-mask, by which attention stays inside documents. Part of test_llama3.cu.
 */
enum { DOCUMENT_END = 2 }; // of make_document_file's tokenizer

/* A token file of `version` with these tokens (8), whose documents end where `ends` (8) says it: by a token in version
 * 1, by bits in version 2. */
static const char *documents_file(int version, const int32_t *ids, const uint8_t *ends) {
    const char *path = scratch_path("ends.tok");
    TokenFileHeader h = ZERO;
    memcpy(h.magic, TOKEN_FILE_MAGIC, 8);
    h.version = (uint32_t)version;
    h.width = 2;
    h.vocab_size = 131;
    h.flags = version == 1 ? 0 : TOKEN_FILE_MASKED;
    h.count = 9;
    h.document_end = DOCUMENT_END;
    FILE *f = fopen(path, "wb");
    fwrite(&h, (size_t)token_header_bytes(&h), 1, f);
    for (int t = 0; t < 9; t++) {
        uint16_t id = (uint16_t)(t < 8 ? ids[t] : 5);
        fwrite(&id, sizeof id, 1, f);
    }
    for (int t = 0; t < 9 && version > 1; t++) fputc(TOKEN_IS_TARGET | (t < 8 && ends[t] ? TOKEN_ENDS_DOCUMENT : 0), f);
    fclose(f);
    return path;
}

/* Which document each token of a window is counted to, at the places where it is easily off by one. */
static void test_documents_of(void) {
    static const struct {
        const char *name;
        int32_t ids[8], docs[8];
    } cases[] = {{"no token ends a document", {5, 6, 7, 5, 6, 7, 5, 6}, {0, 0, 0, 0, 0, 0, 0, 0}},
                 {"every token does", {2, 2, 2, 2, 2, 2, 2, 2}, {0, 1, 2, 3, 4, 5, 6, 7}},
                 {"the first one does", {2, 6, 7, 5, 6, 7, 5, 6}, {0, 1, 1, 1, 1, 1, 1, 1}},
                 {"the last one does", {5, 6, 7, 5, 6, 7, 5, 2}, {0, 0, 0, 0, 0, 0, 0, 0}},
                 {"some do", {5, 2, 2, 5, 6, 2, 5, 6}, {0, 0, 1, 2, 2, 2, 3, 3}}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int32_t docs[8];
        int wrong = 0;
        char name[128];
        for (int version = 1; version <= 2; version++) {
            // in version 2 the bits alone say it: the tokens that end documents elsewhere are others
            int32_t ids[8], inputs[8], targets[8];
            uint8_t ends[8];
            char raw[5 * 9], error[256];
            for (int t = 0; t < 8; t++) {
                ends[t] = cases[i].ids[t] == DOCUMENT_END;
                ids[t] = ends[t] == (version == 1) ? DOCUMENT_END : cases[i].ids[t];
                if (version == 2 && ends[t]) ids[t] = 7;
            }
            Dataset d = dataset_open(documents_file(version, ids, ends), 8, 131, 0);
            d.document_end = DOCUMENT_END;
            int targets_found = dataset_sample(&d, 0, inputs, targets, docs, raw, error, sizeof error);
            for (int t = 0; t < 8; t++) wrong += docs[t] != cases[i].docs[t];
            wrong += targets_found != 8;
            dataset_close(&d);
        }
        snprintf(name, sizeof name, "documents of a window in which %s", cases[i].name);
        CHECK(name, !wrong, "%d of 16 tokens counted to another", wrong);
    }
}

/* Losses (T) of a batch of one window, as validation computes them. */
static float *losses_of_window(Trainer *trainer, int32_t *ids, int32_t *targets) {
    int T = trainer->model.T;
    size_t bytes = sizeof(int32_t) * (size_t)T;
    int32_t *docs = (int32_t *)checked_malloc(bytes);
    document_ids(docs, ids, T, DOCUMENT_END);
    StepBatch batch = ZERO;
    batch.inputs = ids;
    batch.targets = targets;
    if (trainer->model.docs) batch.docs = batch.own_docs = docs;
    step_reports_begin(&trainer->reports);
    model_forward(&trainer->model, &trainer->parallel.pipeline, &batch);
    head_loss(&trainer->model, NO_GRADIENTS);
    fsdp_reshard(&trainer->parallel.fsdp, &trainer->parallel.fsdp.units[trainer->model.table.head], AFTER_LAST_USE);
    free(docs);
    return floats_on_host(&trainer->parallel.dev, trainer->model.losses, T);
}

/* Two windows that differ in the tokens of the first document alone: with the mask no loss behind it changes, without
 * it all do. */
static void test_documents_apart(int masked) {
    enum { T = 96, FIRST = 41 }; // the first document's tokens
    char arguments[512], name[128];
    int32_t ids[2][T], targets[T];
    float *losses[2];
    int changed = 0, before = 0;
    snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --seq %d --batch 1 --deterministic%s", FIXTURES,
             make_document_file("apart.tok", 3000, 40, 7), T, masked ? " --doc-mask" : "");
    Job *j = make_job(arguments, 1, &transport_threads);
    Opened *o = open_rank(j, 0);
    for (int t = 0; t < T; t++) {
        ids[0][t] = ids[1][t] = 3 + (t * 7 + t / 5) % 50;
        targets[t] = 3 + (t * 11) % 60;
    }
    ids[0][FIRST - 1] = ids[1][FIRST - 1] = ids[0][70] = ids[1][70] = DOCUMENT_END;
    for (int t = 0; t < FIRST - 1; t++) ids[1][t] = ids[0][FIRST - 2 - t]; // the other way round
    for (int i = 0; i < 2; i++) losses[i] = losses_of_window(&o->trainer, ids[i], targets);
    for (int t = 0; t < T; t++)
        *(t < FIRST - 1 ? &before : &changed) += memcmp(&losses[0][t], &losses[1][t], sizeof(float)) != 0;
    changed -= memcmp(&losses[0][FIRST - 1], &losses[1][FIRST - 1], sizeof(float)) != 0; // it ends the first document
    snprintf(name, sizeof name,
             masked ? "--doc-mask: losses do not depend on the documents before" : "without --doc-mask they do");
    CHECK(name, before > FIRST / 2 && (masked ? !changed : changed > (T - FIRST) / 2),
          "%d of %d losses behind the first document change with its tokens, and %d of %d in it", changed, T - FIRST,
          before, FIRST - 1);
    free(losses[0]);
    free(losses[1]);
    close_rank(o);
    end_job(j);
}

/* What the loader hands out, by several workers, is what the rule makes of its inputs; a step computes with it. */
static void test_documents_of_steps(void) {
    char arguments[512];
    int wrong = 0, later = 0;
    snprintf(arguments, sizeof arguments,
             "--model %s/odd --data %s --seq 16 --batch 3 --accum 2 --workers 3 --doc-mask", FIXTURES,
             make_document_file("steps.tok", 3000, 12, 7));
    Job *j = make_job(arguments, 1, &transport_threads);
    Opened *o = open_rank(j, 0);
    for (int step = 0; step < 4; step++) {
        const StepBatch *b = loader_next(&o->trainer.loader, &o->trainer.parallel.dev, 60);
        for (int i = 0; i < 6; i++) {
            int32_t docs[16];
            document_ids(docs, b->inputs + 16 * i, 16, DOCUMENT_END);
            wrong += memcmp(docs, b->docs + 16 * i, sizeof docs) != 0;
            later += docs[15];
        }
        loader_release(&o->trainer.loader, &o->trainer.parallel.dev);
    }
    CHECK("the loader tells the documents of every window", !wrong && later > 24,
          "%d of 24 windows are wrong; %d ends of documents", wrong, later);
    close_rank(o);
    end_job(j);
}

static double loss_by_documents[3];

static void evaluate_documents(Job *j, int rank) {
    Opened *o = open_rank(j, rank);
    Evaluation e = evaluate(&o->trainer, &j->val, 0);
    if (rank == 0) loss_by_documents[0] = e.loss;
    close_rank(o);
}

/* Validation tells documents apart: the same loss by 1 and 2 ranks, and another than without. */
static void test_documents_in_validation(void) {
    for (int i = 2; i >= 0; i--) { // without, 2 ranks, 1 rank
        char arguments[768];
        const char *data = make_document_file("validated.tok", 700, 12, 7);
        snprintf(arguments, sizeof arguments, "--model %s/odd --data %s --val %s --seq 16 --batch 2 --deterministic%s",
                 FIXTURES, data, data, i < 2 ? " --doc-mask" : "");
        Job *j = make_job(arguments, i == 1 ? 2 : 1, &transport_threads);
        launch(j, 0, evaluate_documents);
        end_job(j);
        loss_by_documents[i] = loss_by_documents[0];
    }
    CHECK("--doc-mask: validation masks, and 2 ranks have one rank's loss",
          loss_by_documents[0] == loss_by_documents[1] && loss_by_documents[0] != loss_by_documents[2],
          "%.9f and %.9f; without the mask %.9f", loss_by_documents[0], loss_by_documents[1], loss_by_documents[2]);
}

static void test_doc_mask(void) {
    test_documents_of();
    test_fixture("documents", NULL);
    test_documents_of_steps();
    test_documents_apart(1);
    test_documents_apart(0);
    test_documents_in_validation();
    StepBits first[20] = ZERO, without[20] = ZERO;
    char more[512], mask[400];
    int steps = bits_steps;
    bits_steps = 6;
    snprintf(mask, sizeof mask, " --data %s", make_document_file("bits.tok", 9000, 12, 7));
    compare_bits("odd", 0, 1, 1, &transport_threads, mask, without, 1);
    snprintf(mask + strlen(mask), sizeof mask - strlen(mask), " --doc-mask");
    compare_bits("odd", 0, 1, 1, &transport_threads, mask, first, 1);
    CHECK("--doc-mask: the loss is another than without", first[0].loss != without[0].loss, "%.9f and %.9f",
          first[0].loss, without[0].loss);
    static const char *const variants[] = {" --recompute full", " --accumulate local", " --dp-replicate 2"};
    for (int i = 0, world = 1; i < 3; i++, world *= 2) {
        snprintf(more, sizeof more, "%s%s", mask, variants[i]);
        compare_bits("odd", 0, world, 1, &transport_threads, more, first, 0);
    }
    bits_steps = steps;
}
