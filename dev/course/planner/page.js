/* page.js: the planner's page: controls on one side, and on the other the parts of plan.html, which the program itself
 * writes for the settings. */
'use strict';
const data = JSON.parse(document.getElementById('program').textContent);
const by_id = id => document.getElementById(id);
const lists = {presets: data.presets, clusters: [...Object.keys(data.clusters), 'none']};

// ------------------------------------------------------------------ the worker: one evaluation at a time

const source = by_id('run').textContent + by_id('worker').textContent.replace("'use strict';", '');
const worker = new Worker(URL.createObjectURL(new Blob([source], {type: 'text/javascript'})));
worker.postMessage({modules: JSON.parse(by_id('modules').textContent)});
const answers = new Map();
worker.onerror = event => {
    for (const resolve of answers.values()) resolve({failure: `The planner's worker failed: ${event.message}`});
    answers.clear();
};
worker.onmessage = ({data: answer}) => {
    answers.get(answer.id)(answer);
    answers.delete(answer.id);
};
let evaluations = 0;

/* What plan_llama3 prints and writes for the settings. */
function evaluate(settings) {
    const files = Object.fromEntries(Object.entries(data.clusters)
        .map(([name, text]) => [`dev/clusters/${name}.json`, text]));
    return new Promise(resolve => {
        const id = ++evaluations;
        answers.set(id, resolve);
        worker.postMessage({id, precision: settings.precision, args: [...planner_arguments(settings), '--out', 'plan'],
                            files, wanted: ['plan/plan.json', 'plan/plan.html']});
    });
}

// ------------------------------------------------------------------ controls

let settings = initial_settings();
const fields = {}; // by name: {show}, a function that shows a value in the control

function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children);
    return made;
}

/* Controls that need several pipeline stages can be used when there are some. */
function enable_controls() {
    for (const {name, with_stages} of controls)
        if (with_stages) by_id('control-' + name).querySelectorAll('input, select')
            .forEach(field => { field.disabled = settings.pp == '1'; });
}

function choose(name, value) {
    if (settings[name] === value) return;
    settings[name] = value;
    enable_controls();
    history.replaceState(null, '', location.pathname + location.search + settings_to_link(settings));
    plan_soon();
}

/* A word that the list does not have, from a link, is added to it: the program says what it expects. */
function choice_field(control, id) {
    const values = lists[control.choices] ?? control.choices;
    const select = element('select', {id});
    const add = value => select.append(element('option', {value}, value == 'none' && control.name == 'cluster'
        ? 'none: memory and traffic only' : value));
    values.forEach(add);
    select.oninput = () => choose(control.name, select.value);
    fields[control.name] = value => {
        if (![...select.options].some(option => option.value == value)) add(value);
        select.value = value;
    };
    return [select];
}

function flag_field(control, id) {
    const box = element('input', {id, type: 'checkbox'});
    box.oninput = () => choose(control.name, box.checked ? '1' : '');
    fields[control.name] = value => { box.checked = !!value; };
    return [box];
}

/* A slider over the usual values next to a field for any number. */
function number_field(control, id) {
    const {steps} = control, last = steps.length - 1;
    const field = element('input', {id, type: 'text', inputmode: 'numeric', autocomplete: 'off'});
    const slider = element('input', {type: 'range', min: 0, max: last, step: 1, 'aria-label': control.label});
    const show = value => {
        const nearest = steps.findIndex(step => step >= Number(value));
        slider.value = nearest < 0 ? last : nearest;
        slider.setAttribute('aria-valuetext', value);
    };
    slider.oninput = () => {
        field.value = steps[slider.value];
        slider.setAttribute('aria-valuetext', field.value);
        choose(control.name, field.value);
    };
    field.oninput = () => {
        show(field.value);
        choose(control.name, field.value.trim());
    };
    fields[control.name] = value => {
        field.value = value;
        show(value);
    };
    return [slider, field];
}

const field_of = {choice: choice_field, flag: flag_field, number: number_field};
function kind_of(control) {
    if (control.choices) return 'choice';
    return control.flag ? 'flag' : 'number';
}

function build_controls() {
    let group = null;
    for (const control of controls) {
        if (control.group) {
            group = element('fieldset', {}, element('legend', {}, control.group));
            by_id('controls').append(group);
        }
        const id = 'option-' + control.name;
        const help = control.help ?? data.options[control.name].help;
        const kind = kind_of(control), option = control.name == 'precision' ? 'PRECISION' : `--${control.name}`;
        group.append(element('div', {id: 'control-' + control.name, class: 'control ' + kind, title: `${option}: ${help}`},
            element('label', {for: id}, control.label), ...field_of[kind](control, id)));
    }
}

// ------------------------------------------------------------------ results

/* Does the name of a kind of rank, "pp 0, 8-11, tp 0: ranks …", have this pipeline stage? */
const has_stage = (name, stage) => (name.match(/^pp ([\d, -]+)/)?.[1] ?? '').split(', ').some(range => {
    const [first, last] = range.split('-').map(Number);
    return range && first <= stage && stage <= (last ?? first);
});

/* If a plan has many kinds of ranks, shows those of the first, middle and last stage; a button shows the others. */
function shorten_memory(cards, stages) {
    const bars = cards.querySelector('.bars.long');
    const rows = bars ? [...bars.querySelectorAll('.n')].map(name => {
        const row = [name];
        while (row.at(-1).nextElementSibling && !row.at(-1).nextElementSibling.matches('.n'))
            row.push(row.at(-1).nextElementSibling);
        return row;
    }) : [];
    if (rows.length < 5) return;
    const wanted = [0, stages >> 1, stages - 1];
    const is_kept = ([name]) => wanted.some(stage => has_stage(name.textContent, stage));
    if (!rows.some(is_kept)) return;
    const button = element('button', {type: 'button', 'aria-expanded': shows_all_kinds}, '');
    const apply = () => {
        rows.forEach(row => row.forEach(part => { part.hidden = !shows_all_kinds && !is_kept(row); }));
        button.textContent = shows_all_kinds ? 'Show the first, middle and last stage' : `Show all ${rows.length} kinds of ranks`;
        button.setAttribute('aria-expanded', shows_all_kinds);
    };
    button.onclick = () => {
        shows_all_kinds = !shows_all_kinds;
        apply();
    };
    apply();
    bars.after(button);
}
let shows_all_kinds = false;

function tile(doc, name) {
    const found = [...doc.querySelectorAll('.tile')].find(t => t.querySelector('small').textContent == name);
    return found ? found.querySelector('b').textContent : null;
}

/* Shows {result, milliseconds} or {failure} of an evaluation of `planned`. */
function show(planned, {result, milliseconds, failure}) {
    const refused = failure ?? (result.code ? result.stderr.trim() : '');
    by_id('refused').textContent = refused;
    by_id('refused').hidden = !refused;
    by_id('results').hidden = by_id('printed').hidden = !!refused;
    by_id('summary').textContent = refused;
    document.body.classList.toggle('is-refused', !!refused);
    by_id('command').textContent = `make PRECISION=${planned.precision} plan_llama3\n./plan_llama3 ` +
        planner_arguments(planned).join(' ');
    if (refused) return;
    const numbers = JSON.parse(result.files['plan/plan.html'].match(/<script>var plan_data = (.*);<\/script>/)[1]);
    const doc = new DOMParser().parseFromString(`<main>${llama3_page.of_plan(numbers).body}</main>`, 'text/html');
    const step = tile(doc, 'Estimated step'), mfu = tile(doc, 'MFU');
    by_id('summary').textContent = (step ? `${step} per step · MFU ${mfu} · ` : '') + tile(doc, 'Memory per rank');
    const misfit = result.stdout.match(/^ *(memory: .*: does not fit.*)$/m);
    by_id('misfit').textContent = misfit ? misfit[1] : '';
    by_id('misfit').hidden = !misfit;
    shorten_memory(doc, Number(planned.pp));
    by_id('plan').replaceChildren(...doc.querySelectorAll('main > .tiles, main > .cards'));
    for (const scroll of by_id('plan').querySelectorAll('.scroll')) scroll.tabIndex = 0;
    by_id('output').textContent = result.stdout;
    by_id('time').textContent = `planned in ${milliseconds.toFixed(0)} ms`;
}

/* While the worker is busy only the newest settings wait. */
let is_busy = false, is_waiting = false;
async function plan_soon() {
    is_waiting = true;
    if (is_busy) return;
    is_busy = true;
    while (is_waiting) {
        is_waiting = false;
        document.body.classList.add('busy');
        const planned = {...settings}, answer = await evaluate(planned);
        show(planned, answer);
    }
    document.body.classList.remove('busy');
    is_busy = false;
    document.dispatchEvent(new CustomEvent('planned'));
}

function take_link() {
    const {settings: linked, unknown} = settings_of_link(location.hash);
    settings = linked;
    for (const {name} of controls) fields[name](settings[name]);
    enable_controls();
    by_id('unknown').textContent = unknown.length ? `The link has settings that this page does not know: ${unknown
        .join(', ')}. They are left out.` : '';
    by_id('unknown').hidden = !unknown.length;
    plan_soon();
}

by_id('copy').onclick = async () => {
    await navigator.clipboard.writeText(location.href);
    by_id('copied').textContent = 'copied';
};
by_id('controls').onsubmit = () => false;
build_controls();
addEventListener('hashchange', take_link);
take_link();
