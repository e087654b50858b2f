/* target_adapters.h: a directory with adapters.
 * Input: adapter_config.json, 0, and, if anything follows, HEADER 0 DATA of adapter_model.safetensors; else the file
 * that the configuration describes. Follows target_safetensors.h.
 */
#ifndef TARGET_ADAPTERS_H
#define TARGET_ADAPTERS_H

static void give_adapters_file(Bytes in) {
    Bytes header = up_to_zero(&in);
    uint64_t length = header.left;
    uint8_t *file = (uint8_t *)checked_malloc(8 + header.left + in.left);
    memcpy(file, &length, 8);
    if (header.left) memcpy(file + 8, header.at, header.left);
    if (in.left) memcpy(file + 8 + header.left, in.at, in.left);
    give("adapted/adapter_model.safetensors", file, 8 + header.left + in.left);
    free(file);
}

/* The adapters of the table, all zero. */
static void give_good_adapters(const TensorTable *table) {
    OutputFiles out = ZERO;
    output_files_add(&out, table, table_first_adapter(table), table->num_tensors, "adapter_model", STATE_MASTER,
                     STATE_MASTER);
    uint8_t *file = (uint8_t *)checked_malloc((size_t)out.files[0].bytes);
    memcpy(file, out.files[0].header, (size_t)out.files[0].header_bytes);
    give("adapted/adapter_model.safetensors", file, (size_t)out.files[0].bytes);
    free(file);
    output_files_close(&out);
}

static void fuzz_adapter_files(Bytes in) {
    TensorTable table;
    StFiles s;
    Llama3Config c = smallest;
    Bytes config = up_to_zero(&in);
    give("adapted/adapter_config.json", config.at, config.left);
    adapters_config_read(&c, path_of("adapted"));
    held.taken = 1;
    EXPECT(c.lora_rank >= 1 && c.lora_rank <= c.C && c.lora_alpha > 0 && c.lora_targets > 0 &&
               c.lora_targets < 1u << LORA_TARGETS,
           "rank %d, alpha %g, targets %x were taken", c.lora_rank, c.lora_alpha, c.lora_targets);
    c.base = BASE_FROZEN;
    table_open(&table, &c, 0, &WHOLE_MODEL);
    if (in.left) give_adapters_file(in);
    else give_good_adapters(&table);
    if (!in.left) held.promise = "adapters as the configuration describes them";
    adapters_open(&s, path_of("adapted"), &table);
    held.promise = NULL;
    EXPECT(s.count == table.num_tensors - table_first_adapter(&table), "%d adapters were taken, there are %d", s.count,
           table.num_tensors - table_first_adapter(&table));
    for (int i = 0; i < s.count; i++) {
        const StTensor *t = &s.tensors[i];
        const Tensor *want = &table.tensors[table_find(&table, t->name) - table.tensors];
        EXPECT(t->rows == want->rows && t->cols == want->cols && st_find(&s, t->name) == t,
               "tensor %s was taken as it is not", t->name);
    }
    st_close(&s);
    table_close(&table);
}

static const char *const adapter_words[] = {"\"peft_type\":\"LORA\"",
                                            "\"r\":1",
                                            "\"r\":2",
                                            "\"lora_alpha\":16",
                                            "\"target_modules\":[\"q_proj\",\"down_proj\"]",
                                            "\"gate_proj\"",
                                            "\"bias\":\"none\"",
                                            "\"use_dora\":true",
                                            "\"rank_pattern\":{}",
                                            "\"modules_to_save\":null",
                                            "\"dtype\":\"F32\"",
                                            "\"shape\":[2,1]",
                                            "\"data_offsets\":[0,8]",
                                            NULL};

#endif
