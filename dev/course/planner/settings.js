/* settings.js: what the planner's page lets one choose, as options of plan_llama3, and the link that holds it. The page
 * and the test in node use it. */
'use strict';

const powers = most => Array.from({length: most + 1}, (_, i) => 2 ** i);
const chunk_counts = [0, ...Array.from({length: 16}, (_, i) => i + 1)];

/* A control has the name of its option. `steps`: the positions of its slider, while its field takes any number;
 * `choices`: the words to choose from; `presets`, `clusters`: to be filled in from the build. `with_stages`: it has an
 * effect with several pipeline stages only. */
const controls = [
    {group: 'Model', name: 'model', label: 'Model', choices: 'presets', initial: 'llama3-8b'},
    {name: 'precision', label: 'Precision', choices: ['bf16', 'fp32'], initial: 'bf16',
     help: 'dtype of weights and activations, for which the program is built: make PRECISION=bf16|fp32'},
    {name: 'cluster', label: 'Cluster', choices: 'clusters', initial: 'h100-8'},
    {group: 'Ranks', name: 'world', label: 'GPUs', steps: powers(16), initial: '64'},
    {name: 'tp', label: 'Tensor parallel (tp)', steps: powers(6), initial: '1'},
    {name: 'cp', label: 'Context parallel (cp)', steps: powers(6), initial: '1'},
    {name: 'pp', label: 'Pipeline stages (pp)', steps: powers(6), initial: '1'},
    {name: 'dp-replicate', label: 'Replicas (dp-replicate)', steps: powers(10), initial: '1'},
    {group: 'Batch', name: 'seq', label: 'Tokens per sequence', steps: powers(17).slice(8), initial: '8192'},
    {name: 'batch', label: 'Sequences per micro-batch', steps: powers(6), initial: '1'},
    {name: 'accum', label: 'Micro-batches per step', steps: powers(10), initial: '1'},
    {group: 'Pipeline', name: 'pp-schedule', label: 'Schedule', choices: ['1f1b', 'interleaved'], initial: '1f1b',
     with_stages: true},
    {name: 'pp-chunks', label: 'Virtual stages per rank (0: by schedule)', steps: chunk_counts, initial: '0',
     with_stages: true},
    {name: 'pp-light-ends', label: 'First and last stage have a block less', flag: true, initial: '',
     with_stages: true},
    {group: 'Sharding and memory', name: 'sharding', label: 'Sharding',
     choices: ['full_shard', 'shard_grad_op', 'no_shard'], initial: 'full_shard'},
    {name: 'accumulate', label: 'Accumulate gradients', choices: ['sharded', 'local'], initial: 'sharded'},
    {name: 'recompute', label: 'Recompute', choices: ['none', 'selective', 'full', 'every:2', 'every:4'],
     initial: 'selective'},
];

const initial_settings = () => Object.fromEntries(controls.map(control => [control.name, control.initial]));

/* The arguments of plan_llama3. It plans for GPUs: one thread per rank, and NCCL. */
function planner_arguments(settings) {
    const args = ['--threads', '1', '--simulate', 'stages', '--transport', 'nccl'];
    for (const {name, flag, with_stages} of controls) {
        const value = settings[name];
        if (with_stages && settings.pp == '1') continue;
        if (flag && value) args.push('--' + name);
        if (flag || name == 'precision' || (name == 'cluster' && value == 'none')) continue;
        args.push('--' + name, name == 'cluster' ? `dev/clusters/${value}.json` : value);
    }
    return args;
}

/* "#model=llama3-8b&tp=4": the settings that differ from the initial ones. */
function settings_to_link(settings) {
    const changed = controls.filter(({name, initial}) => settings[name] != initial);
    const text = new URLSearchParams(changed.map(({name}) => [name, settings[name]])).toString();
    return text ? '#' + text : '';
}

/* The settings of a link. Values are the program's to judge; `unknown`: names that no control has. */
function settings_of_link(link) {
    const settings = initial_settings(), unknown = [];
    for (const [name, value] of new URLSearchParams(link.replace(/^#/, ''))) {
        if (name in settings) settings[name] = value;
        else unknown.push(name);
    }
    return {settings, unknown};
}
