/* planner_page.js: the planner's page against the native plan_llama3, byte for byte, in node and in headless Chromium;
 * planner_page.sh calls it.
 *   node planner_page.js compare BUILD WORK             50 random layouts; WORK/digests receives each native result's
 *   node planner_page.js links                          settings survive a link
 *   node planner_page.js browse CHROMIUM PAGE WORK      the same 50 layouts, speed and looks in Chromium
 *   node planner_page.js pictures CHROMIUM PAGE FOLDER  screenshots at three widths, in light and dark
 */
'use strict';
const {spawnSync} = require('child_process');
const {createHash} = require('crypto');
const fs = require('fs');
const path = require('path');

const top = path.join(__dirname, '../..');
const read = file => fs.readFileSync(file, 'utf8');
const shared = new Function('performance', read(`${top}/dev/course/planner/settings.js`) +
    read(`${top}/dev/course/planner/run.js`).replace("'use strict';", '') +
    ';return {controls, planner_arguments, planner_run, settings_to_link, settings_of_link, initial_settings};')(performance);
const LAYOUTS = 50, WANTED = ['plan/plan.json', 'plan/plan.html'];

/* The same numbers on every machine: mulberry32. */
function random_numbers(seed) {
    return () => {
        seed = seed + 0x6D2B79F5 | 0;
        let t = Math.imul(seed ^ seed >>> 15, 1 | seed);
        t = t + Math.imul(t ^ t >>> 7, 61 | t) ^ t;
        return ((t ^ t >>> 14) >>> 0) / 4294967296;
    };
}

/* Every other layout is drawn freely, and many of these are refused. Every fifth is too large for its few ranks: its
 * buffers exceed 4 GiB, which a size of 32 bits could not hold. */
function random_layouts() {
    const random = random_numbers(17), pick = list => list[Math.floor(random() * list.length)], layouts = [];
    const models = ['llama3-8b', 'llama3-70b', 'llama3.1-405b', 'llama3.2-1b', 'llama3.2-3b', 'tiny', 'bench-125m'];
    while (layouts.length < LAYOUTS) {
        const s = shared.initial_settings(), free = layouts.length % 2;
        const is_large = layouts.length % 5 == 0;
        s.model = is_large ? 'llama3.1-405b' : pick(models);
        s.precision = pick(['bf16', 'bf16', 'fp32']);
        s.cluster = pick(['h100-8', 'h100-8', 'h100-8', 'none']);
        s.tp = String(pick(free ? [1, 2, 3, 4, 8, 16] : [1, 2, 4]));
        s.cp = String(pick(free ? [1, 2, 3, 4] : [1, 2]));
        s.pp = String(pick(free ? [1, 2, 3, 4, 5, 8, 16] : [1, 2, 4]));
        s['dp-replicate'] = String(pick([1, 1, 2]));
        s.world = String(s.tp * s.cp * s.pp * s['dp-replicate'] * (is_large ? 1 : pick([1, 2, 4, 8, 16, free ? 0.5 : 32])));
        s.seq = String(s.model.match(/^(tiny|bench)/) ? '512' : pick(free ? [1000, 2048, 8192, 8192, 131072] : [1024, 2048]));
        s.batch = String(pick([1, 1, 2, 4]));
        s.accum = String(s.pp * pick([1, 2, 4]));
        s['pp-schedule'] = pick(['1f1b', 'interleaved']);
        s['pp-chunks'] = s['pp-schedule'] == '1f1b' ? String(pick(free ? [0, 0, 2] : [0, 1])) : String(pick([0, 2, 4]));
        s['pp-light-ends'] = pick(['', '', '1']);
        s.sharding = pick(['full_shard', 'shard_grad_op', 'no_shard']);
        s.accumulate = pick(['sharded', 'local']);
        s.recompute = pick(['none', 'selective', 'full', 'every:2', free && random() < 0.3 ? 'every:0' : 'every:4']);
        layouts.push(s);
    }
    return layouts;
}

/* How long the dry runs took, and the memory of the process, differ from run to run. */
const without_time = text => text.replace(/ in \d+\.\d+ s and \d+ MB: /, ' in … s and … MB: ');
const digest_of = r => createHash('sha256').update(JSON.stringify([r.code, without_time(r.stdout), r.stderr,
    ...WANTED.map(name => r.files[name])])).digest('hex');

/* The native program in a folder of its own. */
function run_native(settings, folder) {
    fs.rmSync(folder, {recursive: true, force: true});
    fs.mkdirSync(folder, {recursive: true});
    fs.symlinkSync(`${top}/dev`, `${folder}/dev`);
    const program = `${top}/build/cpu-${settings.precision}/plan_llama3`;
    const {status, stdout, stderr} = spawnSync(program, [...shared.planner_arguments(settings), '--out', 'plan'],
        {cwd: folder, encoding: 'utf8', maxBuffer: 1 << 28});
    const files = {};
    for (const name of WANTED) files[name] = fs.existsSync(`${folder}/${name}`) ? read(`${folder}/${name}`) : null;
    return {code: status, stdout, stderr, files};
}

/* The first difference of two results, in words; null: there is none. */
function difference(native, wasm) {
    if (native.code !== wasm.code) return `exit code ${wasm.code}, native ${native.code}: ${native.stderr}${wasm.stderr}`;
    const parts = {'standard output': r => without_time(r.stdout), 'standard error': r => r.stderr};
    for (const name of WANTED) parts[name] = r => r.files[name];
    for (const [name, part] of Object.entries(parts)) {
        const a = part(native), b = part(wasm);
        if (a === b) continue;
        if (a === null || b === null) return `${name} is missing ${a === null ? 'natively' : 'in WebAssembly'}`;
        let i = 0;
        while (a[i] === b[i]) i++;
        return `${name}, byte ${i}: '${b.slice(i - 30, i + 30)}', native '${a.slice(i - 30, i + 30)}'`;
    }
    return null;
}

function compare(build, work) {
    const cluster = {'dev/clusters/h100-8.json': read(`${top}/dev/clusters/h100-8.json`)}, modules = {};
    let bytes = 0, refused = 0, equal = 0;
    const large = {fp32: 0, bf16: 0};
    for (const p of ['fp32', 'bf16']) modules[p] = new WebAssembly.Module(fs.readFileSync(`${build}/${p}.wasm`));
    const digests = random_layouts().map((settings, i) => {
        const native = run_native(settings, `${work}/native`);
        const args = [...shared.planner_arguments(settings), '--out', 'plan'];
        const wasm = shared.planner_run(modules[settings.precision], args, cluster, WANTED);
        const wrong = difference(native, wasm);
        if (wrong) console.log(`FAIL layout ${i + 1}, ${shared.settings_to_link(settings)}: ${wrong}`);
        equal += !wrong;
        refused += native.code == 1;
        large[settings.precision] += /^ {4}\S+ .* \d+ x +\d{11,}$/m.test(native.stdout);
        bytes += native.stdout.length + native.stderr.length;
        for (const name of WANTED) bytes += native.files[name]?.length ?? 0;
        return digest_of(native);
    });
    fs.writeFileSync(`${work}/digests`, digests.join('\n') + '\n');
    if (equal == LAYOUTS)
        console.log(`pass ${LAYOUTS} random layouts are planned as by the native program, byte for byte: ${equal} of ` +
            `${LAYOUTS}, ${bytes} bytes; ${refused} of them are refused with the same sentence`);
    const has_large = large.fp32 >= 2 && large.bf16 >= 2;
    console.log(`${has_large ? 'pass' : 'FAIL'} some have a buffer of 10 GB or more, beyond 32 bits: ${large.fp32} in ` +
        `fp32, ${large.bf16} in bf16, expected 2 each`);
    const enough = refused >= 10 && refused <= 40;
    console.log(`${enough ? 'pass' : 'FAIL'} the random layouts include both kinds: ${refused} refused, expected 10 to 40`);
}

function links() {
    const layouts = random_layouts(), changed = {...layouts[1], model: 'a b&c=#d', recompute: 'every:3'};
    const survive = s => JSON.stringify(shared.settings_of_link(shared.settings_to_link(s)).settings) == JSON.stringify(s);
    const kept = [...layouts, changed, shared.initial_settings()].filter(survive).length;
    const foreign = shared.settings_of_link('#tp=2&colour=red').unknown.join();
    console.log(`${kept == LAYOUTS + 2 ? 'pass' : 'FAIL'} settings survive a link: ${kept} of ${LAYOUTS + 2}`);
    console.log(`${foreign == 'colour' ? 'pass' : 'FAIL'} a link's unknown names are reported: '${foreign}'`);
}

// ------------------------------------------------------------------ in the browser

const check = (is_good, name, measured) => console.log(`${is_good ? 'pass' : 'FAIL'} ${name}: ${measured}`);
const {Browser} = require('./browser.js');
const address = (page, settings) => 'file://' + path.resolve(page) + shared.settings_to_link(settings);
const with_settings = changes => ({...shared.initial_settings(), ...changes});
const on_16384 = with_settings({model: 'llama3.1-405b', world: '16384', tp: '8', pp: '16', accum: '16',
    'pp-schedule': 'interleaved', 'pp-chunks': '4', recompute: 'full'});
const on_64 = with_settings({model: 'llama3-8b', world: '64', tp: '4', pp: '4', accum: '16'});
const refused = with_settings({tp: '3'});
const IS_SHOWN = '!is_busy && !is_waiting && by_id("summary").textContent != "…"';

/* All layouts as the page's worker evaluates them. */
async function browse_layouts(browser, page, work) {
    await browser.open(address(page, shared.initial_settings()));
    await browser.until(IS_SHOWN);
    const digest = `async settings => {
        const without_time = ${without_time}, {result: r} = await evaluate(settings);
        const text = JSON.stringify([r.code, without_time(r.stdout), r.stderr, ...${JSON.stringify(WANTED)}
            .map(name => r.files[name])]);
        const hash = await crypto.subtle.digest('SHA-256', new TextEncoder().encode(text));
        return [...new Uint8Array(hash)].map(byte => byte.toString(16).padStart(2, '0')).join('');
    }`;
    const native = read(`${work}/digests`).trim().split('\n');
    let equal = 0;
    for (const [i, settings] of random_layouts().entries())
        equal += native[i] == await browser.evaluate(`(${digest})(${JSON.stringify(settings)})`);
    check(equal == LAYOUTS, 'in Chromium the same layouts have the SHA-256 of the native result', `${equal} of ${LAYOUTS}`);
}

/* Milliseconds from a change of `name` to `value` until the plan is drawn. */
const timed_change = (name, value) => `new Promise(resolve => {
    const begin = performance.now();
    document.addEventListener('planned', () => requestAnimationFrame(() => resolve(performance.now() - begin)), {once: true});
    choose('${name}', '${value}');
})`;

/* The time from a change to the drawn plan: the least and the median of some changes. */
async function times_of_changes(browser, page, settings, name, values) {
    const times = [];
    await browser.open(address(page, settings));
    await browser.until(IS_SHOWN);
    for (const value of values) times.push(await browser.evaluate(timed_change(name, value)));
    const what = await browser.evaluate('by_id("summary").textContent');
    return {least: Math.min(...times), median: times.sort((a, b) => a - b)[times.length >> 1], what};
}

async function browse_speed(browser, page) {
    const repeat = (list, times) => Array.from({length: times}, () => list).flat();
    const large = await times_of_changes(browser, page, on_16384, 'accum', repeat(['32', '16'], 5));
    check(large.median < 2000, 'llama3.1-405b on 16,384 GPUs is planned and drawn within 2 s in the median of 10 changes',
        `${large.least.toFixed(0)} ms, median ${large.median.toFixed(0)} ms, bound 2000 ms; ${large.what}`);
    const small = await times_of_changes(browser, page, on_64, 'accum', repeat(['8', '16'], 30));
    check(small.median < 100, 'llama3-8b on 64 GPUs follows a slider within 100 ms in the median of 60 changes',
        `${small.least.toFixed(0)} ms, median ${small.median.toFixed(0)} ms, bound 100 ms; ${small.what}`);
}

async function browse_links(browser, page) {
    await browser.open(address(page, on_16384));
    await browser.until(IS_SHOWN);
    const state = 'JSON.stringify([settings, by_id("output").textContent.replace(/ in .* MB/, "")])';
    const first = await browser.evaluate(state);
    const typed = `(id, value) => {
        const field = document.getElementById(id);
        field.value = value;
        field.dispatchEvent(new Event('input'));
    }`;
    await browser.evaluate(`(${typed})('option-accum', '48')`);
    await browser.until(IS_SHOWN);
    const link = await browser.evaluate('location.hash'), second = await browser.evaluate(state);
    await browser.open('file://' + path.resolve(page) + link);
    await browser.until(IS_SHOWN);
    check(second != first && second == await browser.evaluate(state), 'a changed field is in the link, which restores it',
        link);
    await browser.open(address(page, refused));
    await browser.until(IS_SHOWN);
    const said = await browser.evaluate('by_id("refused").hidden ? "" : by_id("refused").textContent');
    const native = run_native(refused, path.join(require('os').tmpdir(), `planner-${process.pid}`)).stderr.trim();
    check(said && said == native, "a refused layout shows the program's own sentence", said);
}

/* How many fields there are, how many have a label, and how many are in the Tab order when they are enabled. */
const keyboard = `(() => {
    const fields = [...document.querySelectorAll('#controls input, #controls select')];
    const named = fields.filter(field => field.labels.length || field.getAttribute('aria-label')).length;
    const reachable = fields.filter(field => field.tabIndex == 0).length;
    return [fields.length, named, reachable].join();
})()`;

async function browse_looks(browser, page) {
    const script = read(path.join(__dirname, 'page_check.js'));
    for (const scheme of ['light', 'dark'])
        for (const width of [360, 800, 1280])
            for (const settings of [on_16384, on_64, refused]) {
                await browser.open(address(page, settings), {width, scheme, script});
                await browser.until(IS_SHOWN);
                const found = await browser.evaluate(`check_texts(${width}); texts().length + ' texts: ' +
                    (wrong.join('; ') || 'fine')`);
                check(found.endsWith(': fine'), `the page, ${width} pixels, ${scheme}, ${settings.model}, tp ${settings.tp}`,
                    found);
            }
    const [fields, named, reachable] = (await browser.evaluate(keyboard)).split(',');
    check(fields > 15 && named == fields && reachable == fields, 'every control has a label and no tabindex that takes it from the Tab order',
        `${named} and ${reachable} of ${fields}`);
}

async function browse(program, page, work) {
    const browser = new Browser(program, `${work}/profile`);
    try {
        for (const part of [browse_layouts, browse_speed, browse_links, browse_looks]) await part(browser, page, work);
    } finally {
        await browser.close();
    }
}

async function pictures(program, page, folder) {
    fs.mkdirSync(folder, {recursive: true});
    const browser = new Browser(program, `${folder}/profile`);
    for (const scheme of ['light', 'dark'])
        for (const width of [360, 800, 1280])
            for (const [name, settings] of Object.entries({on_16384, on_64, refused})) {
                await browser.open(address(page, settings), {width, scheme});
                await browser.until(IS_SHOWN);
                const height = await browser.evaluate('document.documentElement.scrollHeight');
                await browser.screenshot(`${folder}/${name}-${width}-${scheme}.png`, height);
            }
    await browser.close();
    fs.rmSync(`${folder}/profile`, {recursive: true, force: true});
}

const tasks = {compare, links, browse, pictures}, [task, ...rest] = process.argv.slice(2);
if (!tasks[task]) throw new Error(`planner_page.js was given '${task}'; expected ${Object.keys(tasks).join(', ')}`);
(async () => tasks[task](...rest))().catch(error => {
    console.log(`FAIL ${task}: ${error.message}`);
    process.exitCode = 1;
});
