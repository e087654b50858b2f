/* worker.js: evaluates layouts apart from the page, so that the page answers while a slider is dragged. It receives
 * {modules: {precision: base64 of gzip of WebAssembly}} once, then {id, precision, args, files, wanted}; it answers
 * {id, result, milliseconds}, or {id, failure}. The page puts run.js in front of this file. */
'use strict';
const modules = {};
let packed = null;

/* Each precision is a module of its own, which is compiled when it is first needed. */
function module_of(precision) {
    modules[precision] ??= (async () => {
        const bytes = Uint8Array.from(atob(packed[precision]), character => character.charCodeAt(0));
        const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
        return WebAssembly.compile(await new Response(unpacked).arrayBuffer());
    })();
    return modules[precision];
}

onmessage = async ({data}) => {
    if (data.modules) {
        packed = data.modules;
        return;
    }
    try {
        if (!packed[data.precision]) throw new Error(`PRECISION=${data.precision} is not a build of the program; expected fp32 or bf16`);
        const module = await module_of(data.precision), start = performance.now();
        const result = planner_run(module, data.args, data.files, data.wanted);
        postMessage({id: data.id, result, milliseconds: performance.now() - start});
    } catch (error) {
        postMessage({id: data.id, failure: error.message});
    }
};
