/* browser.js: headless Chromium for tests in node, over its debugging pipe: no port, no package. */
'use strict';
const {spawn} = require('child_process');

class Browser {
    /* `profile`: a folder for what the browser stores. */
    constructor(program, profile) {
        this.process = spawn(program, ['--headless', '--no-sandbox', '--disable-gpu', '--hide-scrollbars',
            '--remote-debugging-pipe', `--user-data-dir=${profile}`, 'about:blank'],
            {stdio: ['ignore', 'ignore', 'ignore', 'pipe', 'pipe']});
        this.waiting = new Map();
        this.calls = 0;
        let text = '';
        this.process.stdio[4].setEncoding('utf8').on('data', part => {
            const messages = (text + part).split('\0');
            text = messages.pop();
            for (const message of messages.map(JSON.parse)) {
                if (!this.waiting.has(message.id)) continue;
                const {resolve, reject} = this.waiting.get(message.id);
                this.waiting.delete(message.id);
                if (message.error) reject(new Error(message.error.message));
                else resolve(message.result);
            }
        });
    }

    call(method, params = {}, sessionId = this.session) {
        const id = ++this.calls;
        this.process.stdio[3].write(JSON.stringify({id, method, params, sessionId}) + '\0');
        return new Promise((resolve, reject) => this.waiting.set(id, {resolve, reject}));
    }

    /* A window of `width` pixels with `script` run before those of the page. */
    async open(url, {width = 1280, height = 1000, scheme = 'light', script = ''} = {}) {
        if (this.target) await this.call('Target.closeTarget', {targetId: this.target}, undefined);
        this.session = undefined;
        const {targetId} = await this.call('Target.createTarget', {url: 'about:blank'});
        const {sessionId} = await this.call('Target.attachToTarget', {targetId, flatten: true});
        this.target = targetId;
        this.session = sessionId;
        await this.call('Page.enable');
        await this.call('Emulation.setDeviceMetricsOverride', {width, height, deviceScaleFactor: 1, mobile: false});
        await this.call('Emulation.setEmulatedMedia', {features: [{name: 'prefers-color-scheme', value: scheme}]});
        await this.call('Page.addScriptToEvaluateOnNewDocument', {source: script});
        await this.call('Page.navigate', {url});
    }

    /* The value of an expression or promise in the page. */
    async evaluate(expression) {
        const {result, exceptionDetails: failed} = await this.call('Runtime.evaluate',
            {expression, awaitPromise: true, returnByValue: true});
        if (failed) throw new Error(failed.exception?.description ?? failed.text);
        return result.value;
    }

    /* Waits until an expression is true, at most `seconds`. */
    async until(expression, seconds = 60) {
        for (const end = Date.now() + 1000 * seconds; Date.now() < end;) {
            if (await this.evaluate(expression).catch(() => false)) return;
            await new Promise(resolve => setTimeout(resolve, 50));
        }
        throw new Error(`not true within ${seconds} s: ${expression}`);
    }

    async screenshot(file, height) {
        await this.call('Page.bringToFront');
        const clip = height && {x: 0, y: 0, width: await this.evaluate('innerWidth'), height, scale: 1};
        const {data} = await this.call('Page.captureScreenshot', {captureBeyondViewport: !!height, clip});
        require('fs').writeFileSync(file, Buffer.from(data, 'base64'));
    }

    async close() {
        const ended = new Promise(resolve => this.process.on('exit', resolve));
        await this.call('Browser.close', {}, undefined).catch(() => {});
        await ended;
    }
}

module.exports = {Browser};
