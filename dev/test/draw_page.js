/* draw_page.js FILE.html [saved]: prints the body that a page draws, without a browser: run.html with the run-data.js
 * next to it, or a page that holds its data. `saved`: prints the page of a run as one file, with its data in it.
 */
'use strict';
const fs = require('fs'), path = require('path'), vm = require('vm');

const [file, how] = process.argv.slice(2), page = fs.readFileSync(file, 'utf8');
const scripts = [...page.matchAll(/<script(?: src="([^"]*)")?>([^]*?)<\/script>/g)]
    .map(([, source, text]) => source ? fs.readFileSync(path.join(path.dirname(file), source), 'utf8') : text)
    .filter(text => !/^llama3_page\.show\(\);$/.test(text)); // what only a browser runs
const drawn = {page, how, result: null};
vm.runInNewContext(scripts.join('\n') + `;
if (how == 'saved') result = llama3_page.as_one_file(page, run_data);
else result = (typeof plan_data == 'undefined' ? llama3_page.of_run(run_data) : llama3_page.of_plan(plan_data)).body;`,
    drawn);
process.stdout.write(drawn.result);
