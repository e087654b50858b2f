/* page_check.js: what only a browser knows of a page: text that overlaps or is too faint, parts wider than the screen,
 * errors of the script. pages.sh and planner_page.js put it into a page; `wrong` lists the first findings.
 */
const wrong = [];
const say = text => { if (wrong.length < 5) wrong.push(text); };
addEventListener('error', event => say('script: ' + event.message));
addEventListener('securitypolicyviolation', event => say('blocked: ' + event.violatedDirective));
const light = color => {
    const linear = v => v < 0.04 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    const [r, g, b] = color.match(/[\d.]+/g).map(v => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
};
const background = element => {
    for (; element; element = element.parentElement) {
        const color = getComputedStyle(element).backgroundColor;
        if (!/, 0\)$|transparent/.test(color)) return color;
    }
    return 'rgb(255, 255, 255)';
};
const texts = () => {
    const all = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
        const parent = node.parentElement;
        if (!node.data.trim() || parent.closest('script,style,title,pre,details:not([open]) table')) continue;
        const range = document.createRange();
        range.selectNodeContents(node);
        const is_clipped = getComputedStyle(parent).overflowY == 'hidden', end = parent.getBoundingClientRect().bottom;
        for (const box of range.getClientRects())
            if (!is_clipped || box.top < end) all.push({box, parent, text: node.data.trim().slice(0, 30)});
    }
    return all;
};
/* Checks all texts in a window of `wanted` pixels. */
const check_texts = wanted => {
    const all = texts(), width = document.documentElement.clientWidth, drawn = document.documentElement.scrollWidth;
    if (width != wanted) say('the window is ' + width + ' wide');
    if (drawn > width) say('the page is ' + drawn + ' wide');
    all.forEach((a, i) => {
        const first = light(getComputedStyle(a.parent).color), second = light(background(a.parent));
        const contrast = Math.max(first, second) / Math.min(first, second);
        if (contrast < 4.5) say('faint (' + contrast.toFixed(1) + '): ' + a.text);
        if (!a.parent.closest('.scroll') && (a.box.left < 0 || a.box.right > width)) say('outside: ' + a.text);
        for (const b of all.slice(i + 1)) {
            const x = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
            const y = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
            if (x > 1 && y > 3 && !a.parent.contains(b.parent) && !b.parent.contains(a.parent))
                say('overlap: ' + a.text + ' | ' + b.text);
        }
    });
};
