/* follow_page.js CHROMIUM OUT WORK: opens run.html of OUT in headless Chromium, in another folder, while its numbers
 * change, and the one file that its button saves. Prints what it found.
 */
'use strict';
const fs = require('fs'), path = require('path');
const {Browser} = require('./browser.js');

const [program, out, work] = process.argv.slice(2), copy = path.join(work, 'a copy');
const numbers = fs.readFileSync(path.join(out, 'run-data.js'), 'utf8');
const put_numbers = text => {
    fs.writeFileSync(path.join(copy, 'part'), text);
    fs.renameSync(path.join(copy, 'part'), path.join(copy, 'run-data.js'));
};
const has = text => `document.querySelector('main').textContent.includes('${text}')`;
const drawn = `[...document.querySelectorAll('main > :not(button)')].map(element => element.outerHTML).join('')`;
const count_reads = `window.reads = 0; document.body.append = function (...elements) {
    window.reads++;
    Element.prototype.append.apply(this, elements);
}; 0`;

async function main() {
    fs.rmSync(copy, {recursive: true, force: true});
    fs.mkdirSync(copy, {recursive: true});
    fs.copyFileSync(path.join(out, 'run.html'), path.join(copy, 'run.html'));
    const browser = new Browser(program, path.join(work, 'profile-follow'));
    try {
        await browser.open('file://' + encodeURI(path.join(copy, 'run.html')));
        await browser.until(has('must be in the same folder'));
        await browser.evaluate(count_reads);
        put_numbers(numbers.replace('"has_ended":1', '"has_ended":0'));
        await browser.until(has(', running.'), 20);
        await browser.evaluate(`document.querySelector('details').open = true`);
        put_numbers(numbers);
        await browser.until(has(', finished.'), 20);
        const is_open = await browser.evaluate(`document.querySelector('details').open`);
        if (!is_open) throw new Error('new numbers close the list of options');
        await browser.evaluate(`document.querySelector('details').open = false`);
        const before = await browser.evaluate('reads');
        await new Promise(resolve => setTimeout(resolve, 6000));
        if (!before || await browser.evaluate('reads') != before) throw new Error('the page of a run that has ended reads its numbers again');
        const saved = await browser.evaluate(`new Promise(resolve => {
            URL.createObjectURL = blob => { blob.text().then(resolve); return '#'; };
            document.querySelector('main > button').click();
        })`);
        const body = await browser.evaluate(drawn), file = path.join(work, 'saved.html');
        fs.writeFileSync(file, saved);
        await browser.open('file://' + encodeURI(file));
        await browser.until(has(', finished.'));
        if (await browser.evaluate(drawn) != body) throw new Error('the saved page draws something else');
        console.log(`${body.length} characters, ${before} times read, ${saved.length} characters as one file`);
    } finally {
        await browser.close();
    }
}

main().catch(error => {
    console.log(error.message);
    process.exitCode = 1;
});
