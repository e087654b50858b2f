/* target_config.h: config.json, and the plan of a model as large as it says.
 * Input: f FILE or d FILE, 0, options of the plan, a word a line. Behind d the file gets what it lacks of a good one.
 * Or a FILE: an adapter_config.json. Follows target_options.h.
 */
#ifndef TARGET_CONFIG_H
#define TARGET_CONFIG_H

/* What is written beside weights is read as the same model. */
static void check_config_written(const Llama3Config *c) {
    config_write_json(c, "float32", c->base, &no_model_ids, stdout);
    held.promise = "the config.json that is written";
    Llama3Config again = config_from_json(give("again.json", said_out.text, said_length(&said_out)));
    held.promise = NULL;
    EXPECT(again.V == c->V && again.C == c->C && again.L == c->L && again.NH == c->NH && again.NKV == c->NKV &&
               again.HD == c->HD && again.F == c->F,
           "another shape was written");
    EXPECT(again.max_positions == c->max_positions && again.tied == c->tied && again.norm_eps == c->norm_eps &&
               again.T == c->T && again.base == c->base,
           "other positions, ties, norm_eps or weights in 8 bits were written");
    EXPECT(again.rope_theta == c->rope_theta && again.rope_factor == c->rope_factor, "another rope was written");
    EXPECT(c->rope_factor == 1 || (again.rope_low == c->rope_low && again.rope_high == c->rope_high &&
                                   again.rope_original == c->rope_original),
           "another rope scaling was written");
    rewind(stdout);
}

static void check_table(const TensorTable *t, const Llama3Config *c) {
    double C = c->C, Q = (double)c->NH * c->HD, KV = (double)c->NKV * c->HD, V = c->V, F = c->F;
    double parameters = c->L * (2 * C * Q + 2 * C * KV + 3 * C * F + 2 * C) + V * C * (c->tied ? 1 : 2) + C;
    int64_t has = t->num_parameters - (c->lora_rank ? t->num_trained : 0); // without adapters
    EXPECT((double)has == parameters, "%" PRId64 " parameters, expected %.0f", has, parameters);
    for (int u = 0; u < t->num_units; u++) {
        int64_t end = 0;
        for (int i = t->units[u].first_tensor; i < t->units[u].end_tensor; i++) {
            const Tensor *tensor = &t->tensors[i];
            EXPECT(tensor->offset >= end && tensor->rows > 0 && tensor->cols > 0,
                   "tensor %s starts at %" PRId64 ", the one before ends at %" PRId64, tensor->name, tensor->offset,
                   end);
            end = tensor->offset + tensor->rows * tensor->cols;
        }
        EXPECT(end == t->units[u].size, "unit %s ends at %" PRId64 " of %" PRId64, t->units[u].name, end,
               t->units[u].size);
    }
}

static void check_rope(const Llama3Config *c) {
    enum { POSITIONS = 3, WIDEST = 64 };
    float table[POSITIONS * WIDEST];
    if (c->HD > WIDEST) return;
    rope_table(table, c, POSITIONS);
    for (int i = 0; i < POSITIONS * c->HD; i++) EXPECT(fabsf(table[i]) <= 1, "the rotation table has %g", table[i]);
}

/* Compares the traffic formula with the dry run of a few micro-batches, then plans all of them. The dry run
 * of a micro-batch whose head is cut into very many pieces takes long: for those only the memory is added up. */
static void check_plan(Job *j, int rank) {
    Traffic expected[AXES][COLLECTIVES];
    static Trainer dry_run;
    int accum = j->run.accum, long_dry_run = (int64_t)j->run.batch * j->run.seq / 16 > 512;
    j->run.accum = 1 + (accum - 1) % 4;
    if (long_dry_run) {
        trainer_bind(&dry_run, j, rank);
        device_open_dry_run(&dry_run.parallel.dev, j->threads_per_rank, 0);
        comm_open_dry_run(&dry_run.parallel.comm, &dry_run.parallel.dev, &j->mesh, rank);
        trainer_allocate(&dry_run);
    } else {
        dry_run_open(&dry_run, j, rank, NULL);
    }
    expected_traffic(expected, &j->config, j->mesh.world, rank, &j->run, sizeof(StepReport));
    for (int i = 0; i < (int)AXES * (int)COLLECTIVES && !long_dry_run; i++) {
        Traffic e = expected[i / COLLECTIVES][i % COLLECTIVES],
                w = dry_run.parallel.comm.traffic_started[i / COLLECTIVES][i % COLLECTIVES];
        EXPECT(traffic_equal(e, w),
               "row %d: expected %" PRId64 " calls and %" PRId64 " bytes, the dry run has %" PRId64 " and %" PRId64, i,
               e.calls, e.bytes, w.calls, w.bytes);
    }
    j->run.accum = accum;
    RankClass all = {rank, &dry_run, &dry_run.parallel.dev, {{{{0, 0}}}}};
    int parts = j->mesh.size[AXIS_TP] * j->mesh.size[AXIS_PP],
        few = !long_dry_run && accum <= 64 && parts <= 8; // of others, as if all were as this one
    Plan plan = ZERO;
    plan.mesh = &j->mesh;
    plan.classes = &all;
    plan.count = 1;
    plan.job = j;
    memcpy(all.traffic[EXPECTED], expected, sizeof expected);
    memcpy(all.traffic[DRY_RUN], dry_run.parallel.comm.traffic_started, sizeof expected);
    if (few) {
        char problem[1024];
        EventLists events;
        Simulation simulation;
        plan_dry_run(&plan, j, DRY_RUN_SHARDS, &events);
        int fits = plan_simulate(&simulation, &plan, &events, NULL, 0, problem, sizeof problem);
        EXPECT(fits, "the ranks do not fit together: %s", problem);
        simulation_close(&simulation);
        event_lists_close(&events);
    } else {
        plan.class_of = (int *)checked_malloc(sizeof(int) * (size_t)j->mesh.world);
    }
    plan_print(stdout, j, &plan, 1);
    EXPECT(said_length(&said_out) > 0, "the plan prints nothing");
    if (j->mesh.world <= 8) { // plan.json lists the ranks
        rewind(stdout);
        json_write_line(stdout, plan_json(&plan, 1, NULL));
        cJSON *json = cJSON_ParseWithLength(said_out.text, said_length(&said_out));
        EXPECT(cJSON_IsObject(json), "plan.json is no JSON: %.*s", (int)said_length(&said_out), said_out.text);
        cJSON_Delete(json);
    }
    if (few) plan_close(&plan);
    else free(plan.class_of);
    trainer_close(&dry_run);
}

/* Gives the file with those lines of a good one whose keys it lacks. */
static void give_completed(Bytes file) {
    static const char *const good[][2] = {{"\"hidden_size\"", "32"},        {"\"num_hidden_layers\"", "2"},
                                          {"\"num_attention_heads\"", "4"}, {"\"intermediate_size\"", "48"},
                                          {"\"vocab_size\"", "600"},        {"\"max_position_embeddings\"", "2048"}};
    char *text = (char *)checked_malloc(file.left + 512);
    while (file.left && file.at[file.left - 1] != '}') file.left--;
    if (file.left > 1) memcpy(text, file.at, file.left - 1);
    size_t end = strlen(text);
    while (end && strchr(" \t\r\n", text[end - 1])) end--;
    text[end] = 0;
    for (size_t i = 0; i < sizeof good / sizeof *good && end; i++)
        if (!strstr(text, good[i][0]))
            end += (size_t)sprintf(text + end, "%s%s:%s", text[end - 1] == '{' ? " " : ",", good[i][0], good[i][1]);
    if (end) strcpy(text + end, "}");
    give("config.json", text, strlen(text));
    free(text);
}

static void fuzz_adapters(Bytes file) {
    Llama3Config c = ZERO, again;
    c.C = 64;
    again = c;
    give("adapter_config.json", file.at, file.left);
    adapters_config_read(&c, folder);
    held.taken = 1;
    EXPECT(c.lora_rank >= 1 && c.lora_rank <= c.C && c.lora_alpha > 0 && c.lora_targets > 0 &&
               c.lora_targets < 1u << LORA_TARGETS,
           "rank %d, alpha %g, targets %x were taken", c.lora_rank, c.lora_alpha, c.lora_targets);
    adapters_config_write(&c, "base", stdout);
    give("adapter_config.json", said_out.text, said_length(&said_out));
    held.promise = "the adapter_config.json that is saved";
    adapters_config_read(&again, folder);
    held.promise = NULL;
    EXPECT(again.lora_rank == c.lora_rank && fabs(again.lora_alpha / c.lora_alpha - 1) < 1e-8 &&
               again.lora_targets == c.lora_targets,
           "other adapters were written");
}

static void fuzz_config(Bytes in) {
    static Planning planning;
    Job *j = &planning.job;
    int rank = in.left > 0 ? in.at[in.left - 1] : 0, kind = next_byte(&in);
    Bytes file = up_to_zero(&in);
    if (kind == 'a') {
        fuzz_adapters(file);
        return;
    }
    if (kind == 'd') give_completed(file);
    else give("config.json", file.at, file.left);
    Llama3Config c = (config_load)(folder);
    held.taken = 1;
    check_config_written(&c);
    check_rope(&c);
    Words w = words_open(in);
    words_add(&w, "--model");
    words_add(&w, folder);
    memset(&planning, 0, sizeof planning);
    planning.program = plan_program;
    job_take_options(j, program_options_parse(&planning.program, &planning.opt, w.count, w.words));
    j->purpose = plan_purpose();
    j->run.out = NULL; // no plan.json
    job_prepare(j, plan_launch(j, planning.opt.world).world, 1, 1);
    check_table(&j->table, &j->config);
    check_plan(j, rank % j->mesh.world);
    job_close(j);
    words_close(&w);
}

static const char *const config_words[] = {
    "\"model_type\":\"llama\"",
    "\"hidden_act\":\"silu\"",
    "\"attention_bias\":false",
    "\"mlp_bias\":null",
    "\"hidden_size\":64",
    "\"num_hidden_layers\":3",
    "\"num_attention_heads\":8",
    "\"num_key_value_heads\":4",
    "\"head_dim\":8",
    "\"intermediate_size\":100",
    "\"vocab_size\":1000",
    "\"max_position_embeddings\":8192",
    "\"rms_norm_eps\":1e-5",
    "\"tie_word_embeddings\":true",
    "\"rope_theta\":10000",
    "\"rope_scaling\":{\"type\":\"default\"}",
    "\"rope_parameters\":{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
    "\"original_max_position_embeddings\":128}",
    "\"rope_type\":null",
    "--world=4",
    "--accum=3",
    "--seq=16",
    "--batch=2",
    "--slots=3",
    "--ranks=2",
    "--vocab-size=100",
    "--deterministic",
    "--accumulate=local",
    "--dp-shard=auto",
    "--tp=2",
    "--cp=2",
    "--pp=2",
    "--pp-schedule=interleaved",
    "--pp-light-ends",
    "--dp-replicate=2",
    "--doc-mask",
    "--lora-rank=4",
    "--lora-targets=q,v,down",
    "--base=int8",
    "--base=int8:all",
    "\"quantization_config\":{\"method\":\"absmax_int8_block64\",\"all_tensors\":false}",
    "\"peft_type\":\"LORA\"",
    "\"r\":8",
    "\"lora_alpha\":16",
    "\"target_modules\":[\"q_proj\",\"down_proj\"]",
    "\"bias\":\"none\"",
    "\"use_dora\":true",
    "\"rank_pattern\":{}",
    NULL};

#endif
