/* page.js: draws the page about a run (run.html, from run-data.js) and the one about a plan (plan.html).
 *
 * of_run and of_plan turn the numbers into {title, body}, the body as HTML, so that they need no browser. Text is HTML
 * and keeps its size at every width; only shapes are SVG, which stretches with the page. Every text of a user goes
 * through `text`. An element of class k-NAME draws in the color of NAME.
 */
'use strict';
const llama3_page = (() => {
    // -----------------------------------------------------------------------------------------------------------------
    // texts and numbers

    /* The character that a page shows: the symbol of a control character, and U+FFFD for a mark that reverses the
     * direction of text, because it could disguise a name. */
    const shown_character = code => {
        if (code < 0x20) return 0x2400 + code;
        if (code == 0x7f) return 0x2421;
        const reverses = (code >= 0x202a && code <= 0x202e) || (code >= 0x2066 && code <= 0x2069) ||
            code == 0x200e || code == 0x200f || code == 0x61c;
        return reverses || (code >= 0x80 && code < 0xa0) || (code >= 0xd800 && code < 0xe000) ? 0xfffd : code;
    };
    /* Any text as text of HTML or as an attribute in quotes. `keeps_lines`: line breaks and tabs remain. */
    const text = (string, keeps_lines = false) => [...String(string)].map(character => {
        const code = character.codePointAt(0);
        if (keeps_lines && (character == '\n' || character == '\t')) return character;
        return '<>&"\''.includes(character) ? `&#${code};` : String.fromCodePoint(shown_character(code));
    }).join('');

    const prefixes = ['', 'k', 'M', 'G', 'T', 'P', 'E'];
    const commas = n => n.toLocaleString('en-US');
    const plural = n => n == 1 ? '' : 's';
    const is_number = x => typeof x == 'number' && isFinite(x);
    const decimals_of = x => { // that show three digits of a positive number below 1,000
        if (x >= 99.95) return 0;
        return x < 9.995 ? 2 : 1;
    };
    /* "12.3 k": three digits, a space and a prefix of the SI, to be followed by a unit such as B. */
    const si = value => {
        let p = 0, x = Math.abs(value);
        for (; x >= 999.5 && p < 6; p++) x /= 1000;
        const decimals = p == 0 && x == Math.floor(x) ? 0 : decimals_of(x);
        return `${value < 0 ? '-' : ''}${x.toFixed(decimals)}\u00a0${prefixes[p]}`;
    };
    const rate = value => si(value) + (/[a-zA-Z]$/.test(si(value)) ? ' ' : '') + 'tokens/s';
    const two_digits = n => String(n).padStart(2, '0');
    /* "31.5 µs", "412 ms", "1.23 s", "3 min 20 s", "2 h 05 min", "3 d 04 h" */
    const duration = seconds => {
        const s = Math.floor(Math.min(Math.max(seconds, 0) + 0.5, 1e15)), ms = 1e3 * seconds, us = 1e6 * seconds;
        const part = (size, within) => two_digits(Math.floor(s / size) % within);
        if (seconds < 5e-8) return '0\u00a0s';
        if (seconds < 0.0009995) return `${us.toFixed(us < 1 ? 1 : decimals_of(us))}\u00a0µs`;
        if (seconds < 0.9995) return `${ms.toFixed(decimals_of(ms))}\u00a0ms`;
        if (seconds < 99.5) return `${seconds.toFixed(decimals_of(seconds))}\u00a0s`;
        if (s < 3600) return `${Math.floor(s / 60)}\u00a0min ${part(1, 60)}\u00a0s`;
        if (s < 86400) return `${Math.floor(s / 3600)}\u00a0h ${part(60, 60)}\u00a0min`;
        return `${Math.floor(s / 86400)}\u00a0d ${part(3600, 24)}\u00a0h`;
    };
    const percent = (part, decimals = 1) => `${(100 * part).toFixed(decimals)}\u00a0%`;

    // -----------------------------------------------------------------------------------------------------------------
    // tiles, cards and legends

    const tile = (name, value, detail = '') =>
        `<div class="tile"><small>${name}</small><b>${value}</b><small>${detail}</small></div>\n`;
    /* `output`: what stands to the right of the title. */
    const card = (title, output, is_wide, content) => `<section class="card${is_wide ? ' wide' : ''}"><header>` +
        `<h2>${title}</h2><output>${output}</output></header>\n${content}</section>\n`;
    /* `shape`: '' for a swatch, line, dash or tick. */
    const legend_item = (shape, color, name) => `<span><i class="${shape} k-${color}"></i>${name}</span>`;
    const legend = (items, style = '') => `<div class="legend"${style}>${items.join('')}</div>\n`;

    // -----------------------------------------------------------------------------------------------------------------
    // curves

    const plot_width = 1000, plot_height = 300; // units of a plot's SVG, which is stretched to the space there is

    /* {low, high, is_log} of the values, with a margin; null: there is no value. A logarithmic scale if they are
     * positive and far apart. `from_zero`: begins at 0. */
    const scale_of = (values, {from_zero = false, may_be_log = false} = {}) => {
        let low = Math.min(...values), high = Math.max(...values);
        if (low > high) return null;
        if (may_be_log && low > 0 && high / low > 40) return {low: low / 1.2, high: high * 1.2, is_log: true};
        if (from_zero && low > 0) low = 0;
        const span = high - low, size = Math.max(Math.abs(high), Math.abs(low));
        let margin = 0.06 * span;
        if (span <= 1e-9 * size || span == 0) margin = size > 0 ? 0.05 * size : 1; // all values are equal
        return {low: from_zero && low == 0 ? 0 : low - margin, high: high + margin, is_log: false};
    };
    const scale_part = (s, value) => s.is_log ? // 0 at `low`, 1 at `high`
        Math.log(Math.max(value, s.low) / s.low) / Math.log(s.high / s.low) : (value - s.low) / (s.high - s.low);
    const plot_x = (x, value) => (plot_width * scale_part(x, value)).toFixed(1);
    const plot_y = (y, value) => (plot_height * (1 - scale_part(y, value))).toFixed(1);

    /* The distance of ticks, 1, 2 or 5 times a power of ten, of which about `count` fit into `span`. */
    const tick_step = (span, count) => {
        const raw = span / count, unit = 10 ** Math.floor(Math.log10(raw));
        return unit * ([1, 2, 5].find(factor => raw / unit <= factor) ?? 10);
    };
    const most_ticks = 8;
    const linear_ticks = (s, count) => {
        const step = tick_step(s.high - s.low, count), ticks = [];
        for (let i = Math.ceil(s.low / step); ticks.length < most_ticks && i * step <= s.high; i++)
            ticks.push(i * step);
        return ticks;
    };
    /* Powers of ten, as many of them as there is room for; over less than two decades also 2 and 5 times them. */
    const log_ticks = s => {
        const first = Math.floor(Math.log10(s.low)), last = Math.floor(Math.log10(s.high)), ticks = [];
        const stride = 1 + Math.floor((last - first) / 6), factors = last - first < 3 ? [1, 2, 5] : [1];
        for (let e = first; e <= last; e += stride)
            for (const factor of factors) ticks.push(factor * 10 ** e);
        return ticks.filter(tick => tick >= s.low && tick <= s.high).slice(0, most_ticks);
    };
    /* A tick's number: with a prefix if it is large, with an exponent if it is tiny. `step`: the distance of ticks; 0:
     * they have no equal distance. */
    const tick_label = (value, step) => {
        const size = Math.abs(value);
        let p = 0;
        if (size <= 1e-6 * step || size < 1e-300) return '0';
        if (size < 0.001) {
            const exponent = Math.floor(Math.log10(size) + 1e-9);
            return `${+(value / 10 ** exponent).toPrecision(3)}·10<sup>−${-exponent}</sup>`;
        }
        for (let x = size; x >= 9999 && p < 6; x /= 1000) p++;
        if (p || !step) return +(value / 1000 ** p).toPrecision(4) + (p ? '\u00a0' + prefixes[p] : '');
        return value.toFixed(Math.min(9, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))));
    };
    /* The label of tick i below a plot or a timeline. At the ends it stays within the plot. A phone shows every other
     * label. */
    const x_label = (x, tick, i, label) => {
        const at = 100 * scale_part(x, tick), side = at < 6 ? 'a' : '';
        return `<span class="${at > 88 ? 'z' : side}${i % 2 ? ' odd' : ''}" style="left:${at.toFixed(1)}%">` +
            `${label}</span>`;
    };
    /* A plot with its ticks. `curves`: names of the values that the pointer shows. `unit`: of the values. */
    const plot = (x, y, curves, unit, shapes) => {
        const ticks = y.is_log ? log_ticks(y) : linear_ticks(y, 5);
        const step = y.is_log || ticks.length < 2 ? 0 : ticks[1] - ticks[0];
        const labels = ticks.map(tick => `<span style="top:${(100 * (1 - scale_part(y, tick))).toFixed(1)}%">` +
            `${tick_label(tick, step)}</span>`);
        const grid = ticks.map(tick => `M0 ${plot_y(y, tick)}h${plot_width}`);
        const below = linear_ticks(x, 5).map((tick, i) => tick == Math.floor(tick) ?
            x_label(x, tick, i, (i ? '' : 'step ') + commas(tick)) : '');
        return `<div class="chart"><div class="y">${labels.join('')}</div>` +
            `<div class="plot" data-curves="${curves.join(' ')}" data-unit="${unit}">` +
            `<svg viewBox="0 0 ${plot_width} ${plot_height}" preserveAspectRatio="none" aria-hidden="true">` +
            `<path class="grid" d="${grid.join('')}"/>\n${shapes.join('')}</svg><i class="cursor"></i></div>` +
            `<div class="x">${below.join('')}</div></div>\n`;
    };
    const path = (style, parts) => `<path class="${style}" d="${parts.join('')}"/>\n`;
    /* A line through the means of points {x, least, mean, most}; a mean of null is a gap, and a point between two gaps
     * is a dot. */
    const line = (style, x, y, points) => path(style, points.map((point, i) => {
        if (point.mean === null) return '';
        const begins = i == 0 || points[i - 1].mean === null;
        return `${begins ? 'M' : 'L'}${plot_x(x, point.x)} ${plot_y(y, point.mean)}${begins ? 'h0' : ''}`;
    }));
    /* The area between the least and the most of each point. */
    const band = (style, x, y, points) => {
        const parts = [];
        for (let begin = 0, end; begin < points.length; begin = end + 1) {
            for (end = begin; end < points.length && points[end].mean !== null; end++);
            const run = points.slice(begin, end);
            run.forEach((p, i) => parts.push(`${i ? 'L' : 'M'}${plot_x(x, p.x)} ${plot_y(y, p.most)}`));
            run.reverse().forEach(p => parts.push(`L${plot_x(x, p.x)} ${plot_y(y, p.least)}`));
            if (run.length) parts.push('z');
        }
        return path(style, parts);
    };
    const dots = (style, x, y, points) => path(style, points.filter(point => point.mean !== null).map(point =>
        `M${plot_x(x, point.x)} ${plot_y(y, point.mean)}h0`));

    // -----------------------------------------------------------------------------------------------------------------
    // bars: rows of a name, a bar of parts, and a value

    /* `style`: '' or long: long names have a line of their own on a phone. */
    const bars = (style, rows) => `<div class="bars ${style}">\n${rows.join('')}</div>\n`;
    const bar_row = (name, parts, value) => `<div class="n" title="${text(name)}">${text(name)}</div>` +
        `<div class="bar">${parts.join('')}</div>` + (value === null ? '\n' : `<div class="v">${value}</div>\n`);
    const bar_part = (color, share, title) => share > 0 ? `<i class="k-${color}" style="width:` +
        `${Math.min(100 * share, 100).toFixed(3)}%" title="${text(title)}"></i>` : '';
    const bar_limit = (share, title) =>
        `<i class="limit" style="left:calc(${(100 * share).toFixed(3)}% - 1px)" title="${title}"></i>`;

    // -----------------------------------------------------------------------------------------------------------------
    // the curves of a run

    const sum = values => values.reduce((total, value) => total + value, 0);
    /* Bucket i has the steps from first_step + i * stride on. */
    const first_of = (data, i) => data.first_step + i * data.stride;
    const last_of = (data, i) => Math.min(first_of(data, i + 1) - 1, data.last_step);
    const bucket_x = (data, i) => (first_of(data, i) + last_of(data, i)) / 2;
    const step_scale = data => data.first_step == data.last_step ?
        {low: data.first_step - 0.5, high: data.last_step + 0.5} : {low: data.first_step, high: data.last_step};
    const mean_of = value => Array.isArray(value) ? value[0] : value;
    /* `is_sparse`: buckets without a value are left out and not drawn as gaps. */
    const curve_points = (data, curve, is_sparse) => data.curves[curve].values.map((value, i) => {
        const [mean, least, most] = Array.isArray(value) ? value : [value, value, value];
        return {x: is_sparse ? last_of(data, i) : bucket_x(data, i), least, mean, most};
    }).filter(point => !is_sparse || point.mean !== null);
    const values_of = points => points.filter(p => p.mean !== null).flatMap(p => [p.least, p.most]);

    /* Vertical lines where the run was resumed, red marks at the top where updates were skipped and, `with_saves`,
     * marks at the bottom where checkpoints were saved. */
    const marks = (data, x, with_saves) => [['resumes', 'dash k-mark', 0, plot_height], ['skips', 'tick k-bad', 0, 18],
        ['saves', 'save k-mark', plot_height - 10, 10]].slice(0, with_saves ? 3 : 2).map(([key, style, top, height]) =>
        path(style, data.counts[key].map((count, i) =>
            count ? `M${plot_x(x, bucket_x(data, i))} ${top}v${height}` : '')));
    const marks_legend = data => [['saves', 'tick', 'mark', 'saved'], ['resumes', 'dash', 'mark', 'resumed'],
        ['skips', 'tick', 'bad', 'update skipped']].map(([key, shape, color, name]) => {
        const count = sum(data.counts[key]);
        return count ? legend_item(shape, color, `${name} (${commas(count)})`) : '';
    });

    const loss_card = data => {
        const loss = curve_points(data, 'loss', false), validation = curve_points(data, 'val_loss', true);
        const shown = data.curves.val_loss.best_step ? 'val_loss' : 'loss', {best, best_step} = data.curves[shown];
        const several = data.stride > 1;
        const items = [legend_item('line', 'loss', several ? 'training, mean and range' : 'training'),
            shown == 'val_loss' ? legend_item('line', 'val', 'validation, best marked') : '', ...marks_legend(data)];
        const output = 'per token' + (best_step ? `; best${shown == 'val_loss' ? ' validation' : ''} ` +
            `${best.toFixed(4)} at step ${commas(best_step)}` : '');
        const x = step_scale(data);
        const y = scale_of([...values_of(loss), ...values_of(validation)], {may_be_log: true});
        if (!y) return card('Loss', output, true, legend(items) + '<p class="none">No finite loss so far</p>\n');
        const at_best = [{x: best_step, mean: best}];
        return card('Loss', output, true, legend(items) + plot(x, y, ['loss', 'val_loss'], '', [
            several ? band('band k-loss', x, y, loss) : '', line('k-loss', x, y, loss), line('k-val', x, y, validation),
            dots('dot k-val', x, y, validation),
            dots(shown == 'loss' ? 'best k-loss' : 'best k-val', x, y, at_best), ...marks(data, x, true)]));
    };

    /* `limit`: a value across the plot, such as that of --clip; 0: none. */
    const curve_card = (data, curve, title, unit, limit, latest) => {
        const points = curve_points(data, curve, false), values = values_of(points), {last} = data.curves[curve];
        const output = is_number(last) ? `latest ${latest(last)}` : 'none so far', x = step_scale(data);
        const is_norm = curve == 'grad_norm';
        if (is_norm && limit > Math.max(...values) && values.length) values.push(limit);
        const y = scale_of(values, {from_zero: !is_norm, may_be_log: is_norm});
        if (!y) return card(title, output, false, '<p class="none">No finite value so far</p>\n');
        return card(title, output, false, plot(x, y, [curve], unit, [
            data.stride > 1 ? band('band k-plain', x, y, points) : '', line('k-plain', x, y, points),
            limit > 0 && limit >= y.low ? path('dash k-host', [`M0 ${plot_y(y, limit)}h${plot_width}`]) : '',
            ...marks(data, x, false)]));
    };

    // -----------------------------------------------------------------------------------------------------------------
    // where the time of a run goes, its memory, its ranks

    const time_names = {compute: 'computing', fsdp: 'waiting for fsdp', dp_replicate: 'waiting for dp_replicate',
        tp: 'waiting for tp', cp: 'waiting for cp', pp: 'waiting for pp', world: 'waiting for all ranks',
        other: 'other waits', data: 'data'};

    const time_card = data => {
        const {steps} = data.counts, keys = Object.keys(time_names);
        const time = (key, i) => mean_of(data.curves[key].values[i]) ?? 0, of_key = {}; // seconds of the mean step
        for (const key of keys)
            of_key[key] = sum(steps.map((count, i) => time(key, i) * count)) / Math.max(1, sum(steps));
        const used = keys.filter(key => of_key[key] > 0), total = sum(Object.values(of_key));
        const output = `rank 0; ${duration(total)} per step`;
        if (!used.length)
            return card("Where a step's time goes", output, true, '<p class="none">No step so far</p>\n');
        const parts = used.map(key => bar_part(key, of_key[key] / total, time_names[key]));
        const items = used.map(key => legend_item('', key,
            `${time_names[key]} ${percent(of_key[key] / total)} (${duration(of_key[key])})`));
        const shares = `<div class="bar">${parts.join('')}</div>` + legend(items, ' style="margin-top:6px"');
        const most = Math.max(...steps.map((_, i) => sum(keys.map(key => time(key, i)))));
        const unit = most < 1 ? 1000 : 1; // values are shown in ms, or in s
        const x = step_scale(data), y = {low: 0, high: 1.05 * unit * most, is_log: false};
        const below = steps.map(() => 0);
        const areas = used.map(key => band(`area k-${key}`, x, y, steps.map((count, i) => {
            const least = below[i];
            below[i] += unit * time(key, i);
            return {x: bucket_x(data, i), least, mean: count ? below[i] : null, most: below[i]};
        })));
        const note = `<p class="note dim">${unit > 1 ? 'Milliseconds' : 'Seconds'} per step</p>`;
        return card("Where a step's time goes", output, true, shares + note + plot(x, y, used, 's', areas));
    };

    const memory_card = data => {
        const rows = data.memory.filter(row => row.peak || row.planned), in_place = rows.filter(row => !row.place);
        const most = Math.max(1, ...rows.flatMap(row => [row.peak, row.planned]));
        const output = `rank 0; peaks together ${si(sum(in_place.map(row => row.peak)))}B, planned ` +
            `${si(sum(in_place.map(row => row.planned)))}B`;
        return card('Memory by category', output, false, bars('', rows.map(row => bar_row(row.category,
            [bar_part(row.category, row.peak / most, 'peak so far'), bar_limit(row.planned / most, 'planned')],
            `${si(row.peak)}B${row.place ? ' ' + text(row.place) : ''} of ${si(row.planned)}B planned`))));
    };

    const most_ranks = 64;
    const ranks_card = data => {
        const steps = data.elapsed_steps, all = data.ranks.map(([host, rate, compute, wait, memory, seconds], rank) =>
            ({rank, host, rate, compute: compute / steps, wait: wait / steps, memory, seconds: seconds / steps}));
        const by_compute = [...all].sort((a, b) => b.compute - a.compute), slowest = by_compute[0];
        const list = all.length > most_ranks ? by_compute.slice(0, most_ranks) : all;
        const mean = sum(all.map(row => row.compute)) / all.length, most = Math.max(...all.map(row => row.seconds));
        const left_out = all.length > most_ranks ? `; the ${most_ranks} ranks that computed longest` : '';
        const items = [legend_item('', 'compute', 'computing'), legend_item('', 'world', 'waiting for other ranks'),
            `<span>per step, mean since this start; peak memory${left_out}</span>`];
        const lead = mean > 0 ? slowest.compute / mean - 1 : 0;
        const output = `rank ${slowest.rank} computed longest, ${percent(lead)} above the mean`;
        return card('Ranks side by side', output, true, legend(items) + bars('', list.map(row => bar_row(
            `rank ${row.rank}${row.host ? ' on ' + row.host : ''}`,
            [bar_part('compute', row.compute / most, 'computing'), bar_part('world', row.wait / most, 'waiting')],
            `${duration(row.compute)} + ${duration(row.wait)} · ${rate(row.rate)} · ${si(row.memory)}B`))));
    };

    // -----------------------------------------------------------------------------------------------------------------
    // the page about a run

    /* The end of after-save.log may begin in the middle of a line, which is left out. */
    const after_save_card = data => {
        const all = data.after_save, end = data.after_save_is_cut ? all.indexOf('\n') + 1 : 0;
        return card('Output of --after-save', data.after_save_is_cut ? 'the end of after-save.log' : '', true,
            `<pre>${text(all.slice(end) || all, true)}</pre>\n`);
    };
    /* A word of a command line, in quotes if the shell would change it. */
    const shell_word = word => /^[\w./:,=+@%-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
    const command_card = data => {
        const words = data.options.filter(([, , is_given]) => is_given).map(([name, value, , is_flag]) =>
            ` --${name}${is_flag ? '' : ' ' + shell_word(value)}`);
        const rows = data.options.map(([name, value, is_given]) =>
            `<tr${is_given ? ' class="given"' : ''}><td>--${name}<td>${text(value)}</tr>\n`);
        return card('Command and options', '', true, `<pre>train_llama3${text(words.join(''))}</pre>\n` +
            '<details><summary>All options in force</summary><table class="text">\n' +
            `${rows.join('')}</table></details>\n`);
    };

    const option = (data, name) => data.options.find(([other]) => other == name)?.[1];
    const status = data => {
        const ended = data.last_step >= data.steps ? 'finished' : 'ended early';
        const when = new Date(1000 * data.written).toISOString().replace('T', ' ').replace(/\..*/, ' UTC');
        const rest = data.has_ended ? '' : '; if that is long ago, the run was killed or has failed';
        const kinds = `${option(data, 'deterministic') ? ', deterministic' : ''}` +
            `${option(data, 'lora-rank') > 0 ? ', LoRA adapters' : ''}`;
        return `<p><b>Step ${commas(data.last_step)} of ${commas(data.steps)}, ` +
            `${data.has_ended ? ended : 'running'}.</b> Written ${when}${rest}.</p>\n` +
            `<p class="dim">${text(data.precision)}, ${text(option(data, 'sharding'))}, ${text(data.mesh)} over ` +
            `${data.world} rank${plural(data.world)}${kinds}</p>\n` +
            '<div class="bar" style="height:4px;margin-top:10px">' +
            `${bar_part('loss', data.last_step / data.steps, 'progress')}</div>\n`;
    };

    const run_tiles = data => {
        const {loss, val_loss, tokens_per_s, seconds, tokens, matmul_share, mfu} = data.curves, tiles = [];
        tiles.push(tile('Training loss', is_number(loss.last) ? loss.last.toFixed(4) : '–',
            loss.best_step ? `lowest ${loss.best.toFixed(4)}` : 'no finite loss so far'));
        if (val_loss.best_step) tiles.push(tile('Best validation loss', val_loss.best.toFixed(4),
            `at step ${commas(val_loss.best_step)}; latest ${val_loss.last.toFixed(4)}`));
        const shares = (matmul_share.last > 0 ? `; ${percent(matmul_share.last, 0)} of the matmul rate` : '') +
            (mfu.last > 0 ? `; MFU ${percent(mfu.last)}` : '');
        tiles.push(tile('Speed', is_number(tokens_per_s.last) ? si(tokens_per_s.last) : '–', 'tokens/s' + shares));
        tiles.push(tile('Last step', duration(seconds.last), 'from data to update'));
        tiles.push(tile('Trained on', si(tokens.last), 'tokens'));
        const left = data.steps - data.last_step;
        if (data.elapsed_steps && left > 0 && !data.has_ended) tiles.push(tile('Remaining',
            duration(data.elapsed / data.elapsed_steps * left), 'at the mean speed so far'));
        const skips = sum(data.counts.skips), most = `at most ${data.most_skips}`;
        if (skips) tiles.push(tile('Updates skipped', commas(skips), data.outliers ?
            `${commas(data.outliers)} with an outlier; others: ${most}` : `of ${most}`));
        return `<div class="tiles">\n${tiles.join('')}</div>\n`;
    };

    const run_footer = data => {
        const lost = data.unreadable, share = data.write_seconds / Math.max(1e-9, data.elapsed);
        const note = lost ? `${commas(lost)} line${plural(lost)} of metrics.jsonl could not be read and ` +
            `${lost > 1 ? 'are' : 'is'} left out. ` : '';
        return '<p class="note dim">Each point of a curve stands for ' +
            `${commas(data.stride)} step${plural(data.stride)}. ${note}Writing these numbers has taken ` +
            `${+(100 * share).toPrecision(2)}&nbsp;% of the time so far. metrics.jsonl has all values.</p>\n`;
    };

    const title_of = (model, world) => `${model} on ${world} rank${plural(world)}`;
    const of_run = data => {
        const title = title_of(option(data, 'model'), data.world), latest = last => tick_label(last, 0);
        return {title, body: `<h1>${text(title)}</h1>\n${status(data)}${run_tiles(data)}<div class="cards">\n` +
            loss_card(data) + curve_card(data, 'grad_norm', 'Gradient norm', '', Number(option(data, 'clip')), latest) +
            curve_card(data, 'lr', 'Learning rate', '', 0, latest) +
            curve_card(data, 'tokens_per_s', 'Speed', 'tokens/s', 0, rate) + memory_card(data) + time_card(data) +
            (data.ranks.length ? ranks_card(data) : '') + ('after_save' in data ? after_save_card(data) : '') +
            command_card(data) + '</div>\n' + run_footer(data)};
    };

    // -----------------------------------------------------------------------------------------------------------------
    // the page about a plan

    const plan_memory_card = data => {
        const memory = data.estimate?.memory ?? 0, most = Math.max(memory, ...data.classes.map(row => row.peak));
        const names = Object.keys(data.classes[0].memory);
        const rows = data.classes.map(row => bar_row(row.ranks, [...names.map(name => bar_part(name,
            row.memory[name] / most, `${name}: ${si(row.memory[name])}B`)),
            memory > 0 ? bar_limit(memory / most, 'memory of a rank') : ''], `${si(row.peak)}B`));
        return card('Memory per rank', memory > 0 ? `the line is a rank's memory, ${si(memory)}B` : '', true,
            legend(names.map(name => legend_item('', name, name))) + bars('long', rows));
    };

    const activity_colors = ['forward', 'head', 'backward', 'rest'];
    const timeline_card = ({seconds, activities, stages}) => {
        const at = time => (plot_width * time / seconds).toFixed(2), x = {low: 0, high: seconds, is_log: false};
        const items = activities.map((name, i) => legend_item('', activity_colors[i], name));
        items.push('<span>gaps: waiting for another stage, or for the end of the step</span>');
        const rows = stages.map((stage, i) => bar_row(`stage ${i}`, [
            `<svg viewBox="0 0 ${plot_width} 1" preserveAspectRatio="none">\n`,
            ...stage.map(([activity, begin, end]) => `<rect class="k-${activity_colors[activity]}" x="${at(begin)}" ` +
                `width="${at(end - begin)}" height="1"><title>stage ${i}: ${activities[activity]}, ` +
                `${+begin.toPrecision(4)} to ${+end.toPrecision(4)} s</title></rect>\n`), '</svg>'], null));
        const ticks = linear_ticks(x, 5).map((tick, i) => x_label(x, tick, i, `${+tick.toPrecision(3)} s`));
        return card('The step', `the first rank of each pipeline stage; ${duration(seconds)}`, true, legend(items) +
            bars('timeline', [...rows, `<div class="x">${ticks.join('')}</div>`]));
    };

    const traffic_card = data => {
        const most = Math.max(1, ...data.axes.map(row => row.bytes)), has_time = 'estimate' in data;
        const head = ['axis', 'groups', 'ranks per group', ...has_time ? ['hosts', 'racks'] : [], 'received',
            ...has_time ? ['communication', 'waited'] : []];
        const rows = data.axes.map(row => [`<i class="swatch k-${row.axis}"></i>${row.axis}`, row.groups, row.ranks,
            ...has_time ? [row.hosts, row.racks ?? ''] : [], `${si(row.bytes)}B`,
            ...has_time ? [duration(row.communication), duration(row.waited)] : []]);
        return card('Traffic', 'received per rank and step', true, bars('', data.axes.map(row => bar_row(row.axis,
            [bar_part(row.axis, row.bytes / most, row.axis)], `${si(row.bytes)}B`))) + '<div class="scroll"><table>' +
            `<tr><th>${head.join('<th>')}</tr>\n` + rows.map(row => `<tr><td>${row.join('<td>')}</tr>\n`).join('') +
            '</table></div>\n');
    };

    const goodput_card = ({rows}) => {
        const columns = Object.keys(rows[0] ?? {}).filter(name => name != 'lost');
        const lost = Object.keys(rows[0]?.lost ?? {});
        const cell = value => typeof value == 'number' ? +value.toPrecision(6) : text(value ?? '');
        return card('Goodput', '', true, '<p>The part of the wall-clock time that advances training although hosts ' +
            'fail, and the parts that are lost.</p>\n<div class="scroll"><table>' +
            `<tr><th>${[...columns, ...lost].map(name => text(name)).join('<th>')}</tr>\n` +
            rows.map(row => `<tr><td>${[...columns.map(name => cell(row[name])),
                ...lost.map(name => percent(row.lost[name], 2))].join('<td>')}</tr>\n`).join('') + '</table></div>\n');
    };

    const plan_tiles = data => {
        const {estimate} = data, tiles = [];
        if (estimate) tiles.push(tile('Estimated step', duration(estimate.step_seconds)),
            tile('Speed', si(estimate.tokens_per_s), 'tokens/s'),
            tile('MFU', percent(estimate.mfu), `of ${si(estimate.peak)}FLOP/s per rank`),
            tile('TFLOP/s', (1e-12 * estimate.flops / estimate.step_seconds).toFixed(1), 'per rank'));
        tiles.push(tile('Tokens per step', si(data.tokens_per_step)),
            tile('Memory per rank', `${si(Math.max(...data.classes.map(row => row.peak)))}B`,
                data.classes.length > 1 ? 'of the kind that needs most' : 'all ranks alike'),
            tile('Parameters', si(data.parameters)));
        return `<div class="tiles">\n${tiles.join('')}</div>\n`;
    };

    const of_plan = data => {
        const title = title_of(data.model, data.world), {estimate} = data;
        return {title, body: `<h1>${text(title)}</h1>\n<p><b>A plan, found by dry runs.</b></p>\n<p class="dim">` +
            `${text(data.precision)}, ${text(data.sharding)}, ${text(data.mesh)}` +
            `${estimate ? '; estimated on ' + text(estimate.cluster) : ''}</p>\n${plan_tiles(data)}` +
            '<div class="cards">\n' + plan_memory_card(data) + (estimate ? timeline_card(estimate) : '') +
            (data.world > 1 ? traffic_card(data) : '') + (data.goodput ? goodput_card(data.goodput) : '') + '</div>\n'};
    };

    // -----------------------------------------------------------------------------------------------------------------
    // in a browser: values at the pointer, new numbers, one file

    const curve_names = {loss: 'loss', val_loss: 'validation', tokens_per_s: '', lr: '', grad_norm: '',
        compute: 'computing'};
    const shown_value = (value, unit) => {
        if (unit == 's') return value < 1 ? `${(1000 * value).toPrecision(3)} ms` : `${value.toPrecision(3)} s`;
        return (value >= 1e4 ? Math.round(value).toLocaleString('en') : +value.toPrecision(5)) + (unit && ' ' + unit);
    };
    /* What the pointer shows of bucket i. */
    const values_at = (data, i, curves, unit) => [`step ${commas(last_of(data, i))}`, ...curves.map(key => {
        const value = data.curves[key].values[i], [mean, least, most] = Array.isArray(value) ? value : [value];
        if (value === null || (unit == 's' && mean === 0)) return '';
        const range = unit == 's' || least === undefined ? '' :
            ` (${shown_value(least, '')} to ${shown_value(most, '')})`;
        return `${curve_names[key] ?? key} ${shown_value(mean, unit)}${range}`.trim();
    }).filter(part => part)].join(' · ');

    let is_pointing = false; // the page is not drawn anew below the pointer
    const follow_pointer = (plot, data) => {
        const output = plot.closest('.card').querySelector('output'), usual = [...output.childNodes];
        const cursor = plot.querySelector('.cursor'), {low, high} = step_scale(data);
        const steps = data.counts.steps.map((_, i) => last_of(data, i));
        plot.onpointermove = plot.onpointerdown = event => {
            const box = plot.getBoundingClientRect(), part = (event.clientX - box.left) / box.width;
            const x = low + part * (high - low);
            let i = steps.findIndex(step => step >= x);
            if (i < 0) i = steps.length - 1;
            if (i > 0 && x - steps[i - 1] < steps[i] - x) i--;
            cursor.style.left = `${100 * (steps[i] - low) / (high - low)}%`;
            cursor.style.visibility = 'visible';
            output.textContent = values_at(data, i, plot.dataset.curves.split(' '), plot.dataset.unit);
            is_pointing = true;
        };
        plot.onpointerleave = plot.onpointercancel = () => {
            output.replaceChildren(...usual);
            cursor.style.visibility = 'hidden';
            is_pointing = false;
        };
    };

    /* `page`, the text of a page that loads run-data.js, with the data in it instead, so that it needs no other file.
     * No text of the data can end the script. */
    const as_one_file = (page, data) => {
        const json = JSON.stringify({...data, is_saved: true}).replace(/[<\u2028\u2029]/g,
            character => '\\u' + character.charCodeAt(0).toString(16).padStart(4, '0'));
        return page.replace('<script src="run-data.js"><\/script>', () => `<script>var run_data = ${json};<\/script>`);
    };
    const save = (page, data) => {
        const link = document.createElement('a');
        link.href = URL.createObjectURL(new Blob([as_one_file(page, data)], {type: 'text/html'}));
        link.download = `run-step-${data.last_step}.html`;
        link.click();
        setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    };

    const put = ({title, body}) => {
        const main = document.querySelector('main'), was_open = main.querySelector('details')?.open;
        document.title = title;
        main.innerHTML = body;
        if (was_open) main.querySelector('details').open = true;
    };

    const reload_seconds = 5;
    /* Shows a run, and reads its numbers again every few seconds until it has ended. */
    const follow_run = () => {
        const page = `<!doctype html>\n${document.documentElement.outerHTML}\n`;
        let shown = ''; // which numbers the page shows
        const read_again = () => {
            const script = document.createElement('script');
            script.src = `run-data.js?${Date.now()}`;
            script.onload = script.onerror = () => {
                script.remove();
                show();
            };
            document.body.append(script);
        };
        const show = () => {
            const data = window.run_data, version = data ? `${data.written} ${data.has_ended}` : '';
            if (!is_pointing && version != shown) {
                shown = version;
                put(of_run(data));
                for (const plot of document.querySelectorAll('.plot')) follow_pointer(plot, data);
                const button = document.createElement('button');
                button.textContent = 'Save as one file';
                button.onclick = () => save(page, data);
                if (!data.is_saved) document.querySelector('main').append(button);
            }
            const is_over = data?.is_saved || (data?.has_ended && version == shown);
            if (!is_over) setTimeout(read_again, 1000 * reload_seconds);
        };
        show();
    };

    /* The last script of a page calls this, so that the page as it was loaded can be saved. */
    const show = () => window.plan_data ? put(of_plan(window.plan_data)) : follow_run();

    return {of_run, of_plan, show, as_one_file, values_at};
})();
