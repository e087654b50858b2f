/* run.js: runs the planner, compiled to WebAssembly: once per call, in an instance of its own, so that nothing of an
 * earlier run is left. The page's worker and the test in node use it. */
'use strict';

class Ended extends Error {
    constructor(code) {
        super(`the program ended with exit code ${code}`);
        this.code = code;
    }
}

/* What the program imports: a clock, its end, and an error for each system call that a plan never makes. */
function planner_imports(module) {
    const imports = {};
    for (const {module: from, name} of WebAssembly.Module.imports(module)) {
        imports[from] ??= {};
        imports[from][name] = () => { throw new Error(`the planner called ${name}, which a page does not have`); };
    }
    imports.page.seconds = () => performance.now() / 1000;
    imports.wasi_snapshot_preview1.proc_exit = code => { throw new Ended(code); };
    return imports;
}

/* Runs the program with `args`. `files`: {path: text} that it can read; `wanted`: paths to return. Returns {code,
 * stdout, stderr, files: {path: text, or null}}. */
function planner_run(module, args, files, wanted) {
    const {exports} = new WebAssembly.Instance(module, planner_imports(module));
    const encoder = new TextEncoder(), decoder = new TextDecoder();
    const give = text => {
        const bytes = encoder.encode(text), at = exports.host_room(bytes.length + 1) >>> 0;
        new Uint8Array(exports.memory.buffer, at, bytes.length).set(bytes);
        return [at, bytes.length];
    };
    const take = path => {
        const [name] = give(path), at = exports.host_get(name) >>> 0, size = exports.host_size(name) >>> 0;
        return at ? decoder.decode(new Uint8Array(exports.memory.buffer, at, size)) : null;
    };
    exports.__wasm_call_ctors();
    for (const [path, text] of Object.entries(files)) {
        const [name] = give(path);
        exports.host_put(name, ...give(text));
    }
    const result = {code: null, stdout: '', stderr: '', files: {}};
    try {
        exports.host_start(give(['plan_llama3', ...args].join('\0'))[0], args.length + 1);
    } catch (end) {
        if (!(end instanceof Ended)) throw end;
        result.code = end.code;
    }
    result.stdout = take('/stdout') ?? '';
    result.stderr = take('/stderr') ?? '';
    for (const path of wanted) result.files[path] = take(path);
    return result;
}
