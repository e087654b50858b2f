/* page.h: the look of run.html and plan.html, and the drawing that they share.
 *
 * A page is one file without external parts, readable from 320 pixels on and in light and dark. Text is HTML and keeps
 * its size at every width; only shapes are SVG, which stretches with the page. A caller may rely on: page_text makes
 * any bytes inert; nothing that this file draws needs a script.
 */
#ifndef PAGE_H
#define PAGE_H
#include "../lib/base.h"

/* Colours have a name for each thing that pages show, and the same one everywhere: axes of the mesh, what a rank does,
 * categories of memory. An element of class k-NAME draws in that colour. */
static const char page_style[] =
    ":root{color-scheme:light dark;--bg:#f6f7f8;--card:#fff;--ink:#1c2126;--dim:#5c6670;--line:#e2e5e8;"
    "--loss:#2b6cb0;--val:#c05a1c;--plain:#4a6274;--bad:#c02f3f;--mark:#7a5bb0;"
    "--compute:#71859a;--fsdp:#2f74c8;--dp_replicate:#8a63b8;--tp:#d9822b;--cp:#2f9468;--pp:#c94f77;"
    "--dp_shard:#2f9468;--world:#bcc5cd;--other:#dbe0e4;--data:#a3862f;"
    "--params:#5b7fa6;--grads:#c08457;--optimizer:#7d9b6a;--activations:#a76f8e;--comm:#62a09c;--workspace:#b5a25a;"
    "--host:#9299a1;--forward:#6f9fd0;--head:#d06a6a;--backward:#5fa886;--rest:#b4bbc2}\n"
    "@media(prefers-color-scheme:dark){:root{--bg:#14171a;--card:#1c2024;--ink:#e4e7ea;--dim:#98a2ac;--line:#30363c;"
    "--loss:#6aa9ec;--val:#ec8f4f;--plain:#9db4c6;--bad:#f0606e;--mark:#ab90dc;"
    "--compute:#7d90a3;--fsdp:#4f96ea;--dp_replicate:#a584d4;--tp:#e39a4c;--cp:#45b585;--pp:#e0709a;"
    "--dp_shard:#45b585;--world:#4b555f;--other:#343b42;--data:#c2a64c}}\n"
    "*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.45 system-ui,sans-serif;"
    "font-variant-numeric:tabular-nums}main{max-width:1120px;margin:auto;padding:20px 16px 40px}"
    "h1{font-size:22px;line-height:1.25;margin:0;overflow-wrap:anywhere}h2{font-size:15px;margin:0}"
    "p{margin:4px 0;overflow-wrap:anywhere}.dim,output,.x,.y{color:var(--dim)}small,.x,.y,.note{font-size:12px}\n"
    ".tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:12px;margin:16px 0}"
    ".tile,.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 12px}"
    ".tile b{display:block;font-size:20px;line-height:1.3;font-weight:600;white-space:nowrap}"
    ".tile small{color:var(--dim);display:block}"
    ".cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr));gap:12px}"
    ".card{min-width:0;margin:0}.wide{grid-column:1/-1}"
    ".card header{display:flex;flex-wrap:wrap;justify-content:space-between;gap:0 12px;margin-bottom:6px}"
    ".card output{font-size:12px;min-height:1.45em}.none{padding:24px 0;text-align:center;color:var(--dim)}\n"
    ".legend{display:flex;flex-wrap:wrap;gap:2px 14px;margin:0 0 6px;font-size:12px;color:var(--dim)}"
    ".legend i,td i.swatch{display:inline-block;width:10px;height:10px;border-radius:2px;background:currentColor;"
    "margin-right:5px}.legend i.line{height:3px;border-radius:0;vertical-align:3px;width:14px}"
    ".legend i.dash{height:12px;width:0;border-left:2px dashed;background:none;vertical-align:-1px}"
    ".legend i.tick{height:8px;width:3px;border-radius:0}"
    ".chart{display:grid;grid-template-columns:50px 1fr}.plot{position:relative;height:180px;touch-action:pan-y}"
    ".wide .plot{height:230px}.plot svg,.bars svg{position:absolute;width:100%;height:100%;display:block;left:0;top:0}"
    ".plot svg{overflow:visible}.y{position:relative}"
    ".y span{position:absolute;right:6px;transform:translateY(-50%);white-space:nowrap}"
    ".x{grid-column:2;position:relative;height:20px}"
    ".x span{position:absolute;top:3px;transform:translateX(-50%);white-space:nowrap}"
    ".x span.a{transform:none}.x span.z{transform:translateX(-100%)}"
    "path,line{vector-effect:non-scaling-stroke;fill:none;stroke:currentColor;stroke-width:1.6;stroke-linejoin:round;"
    "stroke-linecap:round}path.area,rect{fill:currentColor;stroke:none}path.band{fill:currentColor;fill-opacity:.25;"
    "stroke-opacity:.5;stroke-width:1}path.grid{color:var(--line);stroke-width:1}path.dot{stroke-width:6}"
    "path.best{stroke-width:10}path.dash{stroke-dasharray:4 4;stroke-width:1.2;stroke-linecap:butt}"
    "path.tick{stroke-width:3;stroke-linecap:butt}path.save{stroke-width:2;stroke-linecap:butt;stroke-opacity:.7}"
    ".cursor{position:absolute;top:0;bottom:0;width:1px;left:-9px;background:var(--dim);pointer-events:none;"
    "visibility:hidden}\n"
    ".bars{display:grid;grid-template-columns:fit-content(40%) 1fr auto;gap:5px 10px;align-items:center}"
    ".bars .n{white-space:nowrap;overflow:hidden;text-overflow:ellipsis}.bars .v{color:var(--dim);font-size:12px;"
    "white-space:nowrap}.bar{position:relative;display:flex;height:14px;border-radius:2px;overflow:hidden;"
    "background:var(--line)}.bar i{background:currentColor}.bar .limit{position:absolute;top:0;bottom:0;width:2px;"
    "background:var(--ink)}.bars .x{grid-column:2}"
    ".bars.timeline{grid-template-columns:auto 1fr}.timeline .bar{background:none;height:18px}\n"
    "@media(max-width:560px){main{padding:14px 10px 30px}.bars{grid-template-columns:fit-content(40%) 1fr}"
    ".bars .v{grid-column:2;margin-top:-4px;white-space:normal}.bars .n{white-space:normal;overflow-wrap:anywhere}"
    ".bars.long{grid-template-columns:1fr}.bars.long .v{grid-column:1;margin-bottom:6px}.x span.odd{display:none}"
    ".tile b{font-size:17px}"
    ".tiles{grid-template-columns:repeat(auto-fit,minmax(120px,1fr));gap:8px}}\n"
    ".scroll{overflow-x:auto;margin-top:8px}table{border-collapse:collapse}"
    "td,th{padding:3px 14px 3px 0;text-align:right;"
    "white-space:nowrap;font-weight:400}th{color:var(--dim);font-size:12px}"
    "td:first-child,th:first-child,table.text td{text-align:left}table.text td{white-space:normal;"
    "overflow-wrap:anywhere;vertical-align:top}tr.given td{font-weight:600}"
    "pre{margin:6px 0;padding:8px;background:var(--bg);border-radius:6px;white-space:pre-wrap;overflow-wrap:anywhere;"
    "font:12px/1.5 ui-monospace,monospace;max-height:320px;overflow-y:auto}summary{cursor:pointer}\n";

/* Every name of a colour. */
static const char *const page_colors[] = {
    "loss", "val",      "plain", "bad",   "mark",   "compute", "fsdp",      "dp_replicate", "tp",   "cp",        "pp",
    "data", "dp_shard", "world", "other", "params", "grads",   "optimizer", "activations",  "comm", "workspace", "host",
    "head", "forward",  "rest",  "backward"};

// ---------------------------------------------------------------------------
// text

/* The code point of a valid UTF-8 character of (length) bytes. */
static uint32_t utf8_code(const uint8_t *p, size_t length) {
    uint32_t code = length == 1 ? p[0] : p[0] & (0x7Fu >> length);
    for (size_t i = 1; i < length; i++) code = code << 6 | (p[i] & 0x3Fu);
    return code;
}

/* The character that a page shows: the symbol of a control character (U+2400 and up), and U+FFFD for a mark that
 * reverses the direction of text, because it could disguise a name. */
static uint32_t shown_character(uint32_t code) {
    int reverses = (code >= 0x202A && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069) || code == 0x200E ||
                   code == 0x200F || code == 0x061C;
    if (code < 0x20) return 0x2400 + code;
    if (code == 0x7F) return 0x2421;
    return reverses || (code >= 0x80 && code < 0xA0) ? 0xFFFD : code;
}

/* Writes (length) bytes as text of HTML or as the value of an attribute in quotes. Bytes that are not UTF-8
 * become U+FFFD. * `keeps_lines`: line breaks and tabs remain. */
static void page_bytes_as_text(FILE *f, const char *text, size_t length, int keeps_lines) {
    const uint8_t *p = (const uint8_t *)text;
    for (size_t i = 0, bytes; i < length; i += bytes) {
        size_t valid = utf8_character_length(p + i, length - i);
        uint32_t code = valid ? utf8_code(p + i, valid) : 0, shown = valid ? shown_character(code) : 0xFFFD;
        int is_markup = code == '<' || code == '>' || code == '&' || code == '"' || code == '\'';
        int is_line = keeps_lines && (code == '\n' || code == '\t');
        bytes = valid ? valid : 1;
        if (is_line) fputc((int)code, f);
        else if (is_markup || shown != code) fprintf(f, "&#%u;", shown);
        else fwrite(p + i, 1, bytes, f);
    }
}

static void page_text(FILE *f, const char *text) { page_bytes_as_text(f, text, strlen(text), 0); }

/* How many decimals show three digits of a positive number below 1,000. */
static int decimals_of(double x) {
    if (x >= 99.95) return 0;
    return x < 9.995 ? 2 : 1;
}

/* "12.3 k": three digits, a space and a prefix of the SI, to be followed by a unit such as B. */
static const char *page_si(char text[32], double value) {
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
    int p = 0;
    double x = fabs(value);
    for (; x >= 999.5 && p < 6; p++) x /= 1000;
    int decimals = p == 0 && x == floor(x) ? 0 : decimals_of(x);
    snprintf(text, 32, "%s%.*f\u00A0%s", value < 0 ? "-" : "", decimals, x, prefixes[p]);
    return text;
}

/* "12.3 k tokens/s" */
static const char *page_rate(char text[48], double tokens_per_second) {
    size_t used = strlen(page_si(text, tokens_per_second));
    int has_prefix = text[used - 1] > 0 && text[used - 1] < 0x7F; // else it ends with the space
    snprintf(text + used, 48 - used, "%stokens/s", has_prefix ? " " : "");
    return text;
}

/* A duration: "31.5 µs", "412 ms", "1.23 s", "3 min 20 s", "2 h 05 min", "3 d 04 h". */
static const char *page_duration(char text[32], double seconds) {
    int64_t s = (int64_t)fmin(fmax(seconds, 0) + 0.5, 1e15);
    double ms = 1e3 * seconds, us = 1e6 * seconds;
    if (seconds < 5e-8) snprintf(text, 32, "0\u00A0s");
    else if (seconds < 0.0009995) snprintf(text, 32, "%.*f\u00A0µs", us < 1 ? 1 : decimals_of(us), us);
    else if (seconds < 0.9995) snprintf(text, 32, "%.*f\u00A0ms", decimals_of(ms), ms);
    else if (seconds < 99.5) snprintf(text, 32, "%.*f\u00A0s", decimals_of(seconds), seconds);
    else if (s < 3600) snprintf(text, 32, "%" PRId64 "\u00A0min %02" PRId64 "\u00A0s", s / 60, s % 60);
    else if (s < 86400) snprintf(text, 32, "%" PRId64 "\u00A0h %02" PRId64 "\u00A0min", s / 3600, s / 60 % 60);
    else snprintf(text, 32, "%" PRId64 "\u00A0d %02" PRId64 "\u00A0h", s / 86400, s / 3600 % 24);
    return text;
}

/* "1,234,567" */
static const char *with_commas(char text[32], int64_t n) {
    char digits[24];
    int length = snprintf(digits, sizeof digits, "%" PRId64, n), used = 0;
    for (int i = 0; i < length; i++) {
        if (i && (length - i) % 3 == 0) text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = 0;
    return text;
}

// ---------------------------------------------------------------------------
// the frame of a page

/* `title`: any bytes. `refresh`: seconds after which a browser reads the file again; 0: it does not. The policy forbids
 * everything that is not in the file. */
static void page_open(FILE *f, const char *title, int refresh) {
    fprintf(f, "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">"
               "<meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">"
               "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none';style-src "
               "'unsafe-inline';script-src 'unsafe-inline'\">");
    if (refresh) fprintf(f, "<meta http-equiv=\"refresh\" content=\"%d\">", refresh);
    fprintf(f, "<title>");
    page_text(f, title);
    fprintf(f, "</title>\n<style>%s", page_style);
    for (int i = 0; i < (int)(sizeof page_colors / sizeof *page_colors); i++)
        fprintf(f, ".k-%s{color:var(--%s)}", page_colors[i], page_colors[i]);
    fprintf(f, "</style></head>\n<body><main>\n<h1>");
    page_text(f, title);
    fprintf(f, "</h1>\n");
}

static void page_close(FILE *f) { fprintf(f, "</main></body></html>\n"); }

static void page_tile(FILE *f, const char *name, const char *value, const char *detail) {
    fprintf(f, "<div class=\"tile\"><small>%s</small><b>%s</b><small>%s</small></div>\n", name, value, detail);
}

/* `output`: what stands to the right of the title. The caller closes with page_card_close. */
static void page_card_open(FILE *f, const char *title, const char *output, int is_wide) {
    fprintf(f, "<section class=\"card%s\"><header><h2>%s</h2><output>%s</output></header>\n", is_wide ? " wide" : "",
            title, output);
}
static void page_card_close(FILE *f) { fprintf(f, "</section>\n"); }

/* `shape`: swatch, line, dash or tick. */
static void page_legend_item(FILE *f, const char *shape, const char *color, const char *name) {
    fprintf(f, "<span><i class=\"%s k-%s\"></i>%s</span>", shape, color, name);
}

// ---------------------------------------------------------------------------
// curves

enum { PLOT_WIDTH = 1000, PLOT_HEIGHT = 300 }; // units of a plot's SVG, which is stretched to the space there is

typedef struct {
    double low, high;
    int is_log;
} PlotScale;

typedef struct {
    double x, least, mean, most; // NAN: a gap
} CurvePoint;

static double scale_part(const PlotScale *s, double value) { // 0 at `low`, 1 at `high`
    if (s->is_log) return log(fmax(value, s->low) / s->low) / log(s->high / s->low);
    return (value - s->low) / (s->high - s->low);
}
static double plot_x(const PlotScale *x, double value) { return (double)PLOT_WIDTH * scale_part(x, value); }
static double plot_y(const PlotScale *y, double value) { return (double)PLOT_HEIGHT * (1 - scale_part(y, value)); }

/* Widens a scale so that it includes the points. An empty one has low > high. */
static void scale_include(PlotScale *s, const CurvePoint *points, int n) {
    for (int i = 0; i < n; i++) {
        if (!isfinite(points[i].mean)) continue;
        s->low = fmin(s->low, points[i].least);
        s->high = fmax(s->high, points[i].most);
    }
}

/* Adds a margin; a logarithmic scale if the values are positive and far apart. `from_zero`: begins at 0. */
static void scale_finish(PlotScale *s, int from_zero, int may_be_log) {
    s->is_log = may_be_log && s->low > 0 && s->high / s->low > 40;
    if (s->is_log) {
        s->low /= 1.2;
        s->high *= 1.2;
        return;
    }
    if (from_zero && s->low > 0) s->low = 0;
    double span = s->high - s->low, size = fmax(fabs(s->high), fabs(s->low));
    double margin = 0.06 * span;
    if (span <= 1e-9 * size) margin = size > 0 ? 0.05 * size : 1; // all values are equal
    if (!(from_zero && s->low == 0)) s->low -= margin;
    s->high += margin;
}

/* The distance of ticks, 1, 2 or 5 times a power of ten, of which about `count` fit into `span`. */
static double tick_step(double span, int count) {
    double raw = span / count, unit = pow(10, floor(log10(raw)));
    if (raw / unit <= 1) return unit;
    if (raw / unit <= 2) return 2 * unit;
    return raw / unit <= 5 ? 5 * unit : 10 * unit;
}

enum { MOST_TICKS = 8 };

static int linear_ticks(const PlotScale *s, double ticks[MOST_TICKS], int count) {
    double step = tick_step(s->high - s->low, count);
    int n = 0;
    for (double i = ceil(s->low / step); n < MOST_TICKS && i * step <= s->high; i++) ticks[n++] = i * step;
    return n;
}

/* Powers of ten, as many of them as there is room for; over less than two decades also 2 and 5 times them. */
static int log_ticks(const PlotScale *s, double ticks[MOST_TICKS]) {
    static const double factors[3] = {1, 2, 5};
    int first = (int)floor(log10(s->low)), last = (int)floor(log10(s->high)), n = 0;
    int stride = 1 + (last - first) / 6, all = last - first < 3;
    for (int e = first; e <= last; e += stride)
        for (int k = 0; k < (all ? 3 : 1) && n < MOST_TICKS; k++) {
            double tick = factors[k] * pow(10, e);
            if (tick >= s->low && tick <= s->high) ticks[n++] = tick;
        }
    return n;
}

/* A tick's number: with a prefix if it is large, with an exponent if it is tiny. `step`: the distance of ticks; 0: they
 * have no equal distance. */
static const char *tick_label(char text[48], double value, double step) {
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
    double size = fabs(value);
    int p = 0;
    if (size <= 1e-6 * step || size < 1e-300) return "0";
    if (size < 0.001) {
        int exponent = (int)floor(log10(size) + 1e-9);
        snprintf(text, 48, "%.3g·10<sup>−%d</sup>", value / pow(10, exponent), -exponent);
        return text;
    }
    for (double x = size; x >= 9999 && p < 6; x /= 1000) p++;
    int decimals = step > 0 ? (int)fmin(9, fmax(0, ceil(-log10(step) - 1e-9))) : 0;
    if (p || !step) snprintf(text, 48, "%.4g%s%s", value / pow(1000, p), p ? "\u00A0" : "", prefixes[p]);
    else snprintf(text, 48, "%.*f", decimals, value);
    return text;
}

/* Opens a plot with its ticks; shapes follow, then plot_close. `curves`: names in the page's data whose values a script
 * may show, parted by blanks. `unit`: of the values, "" for none. */
static void plot_open(FILE *f, const PlotScale *y, const char *curves, const char *unit) {
    double ticks[MOST_TICKS];
    char text[48];
    int n = y->is_log ? log_ticks(y, ticks) : linear_ticks(y, ticks, 5);
    fprintf(f, "<div class=\"chart\"><div class=\"y\">");
    for (int i = 0; i < n; i++)
        fprintf(f, "<span style=\"top:%.1f%%\">%s</span>", 100 * (1 - scale_part(y, ticks[i])),
                tick_label(text, ticks[i], y->is_log || n < 2 ? 0 : ticks[1] - ticks[0]));
    fprintf(f,
            "</div><div class=\"plot\" data-curves=\"%s\" data-unit=\"%s\"><svg viewBox=\"0 0 %d %d\" "
            "preserveAspectRatio=\"none\" aria-hidden=\"true\"><path class=\"grid\" d=\"",
            curves, unit, PLOT_WIDTH, PLOT_HEIGHT);
    for (int i = 0; i < n; i++) fprintf(f, "M0 %.1fh%d", plot_y(y, ticks[i]), PLOT_WIDTH);
    fprintf(f, "\"/>\n");
}

/* Opens the label of tick i below a plot or a timeline. At the ends it stays within the plot. A phone shows every other
 * label. */
static void plot_tick_open(FILE *f, const PlotScale *x, double tick, int i) {
    double at = 100 * scale_part(x, tick);
    const char *side = at < 6 ? "a" : "";
    if (at > 88) side = "z";
    fprintf(f, "<span class=\"%s%s\" style=\"left:%.1f%%\">", side, i % 2 ? " odd" : "", at);
}

/* Whole numbers below the plot, with `unit` before the first one. */
static void plot_close(FILE *f, const PlotScale *x, const char *unit) {
    double ticks[MOST_TICKS];
    char text[32];
    int n = linear_ticks(x, ticks, 5);
    fprintf(f, "</svg><i class=\"cursor\"></i></div><div class=\"x\">");
    for (int i = 0; i < n; i++) {
        if (ticks[i] != floor(ticks[i])) continue;
        plot_tick_open(f, x, ticks[i], i);
        fprintf(f, "%s%s</span>", i ? "" : unit, with_commas(text, (int64_t)ticks[i]));
    }
    fprintf(f, "</div></div>\n");
}

/* A line through the means; a point between two gaps is a dot. */
static void plot_line(FILE *f, const char *style, const PlotScale *x, const PlotScale *y, const CurvePoint *points,
                      int n) {
    int is_gap = 1;
    fprintf(f, "<path class=\"%s\" d=\"", style);
    for (int i = 0; i < n; i++) {
        int was_gap = is_gap;
        is_gap = !isfinite(points[i].mean);
        if (is_gap) continue;
        fprintf(f, "%c%.1f %.1f%s", was_gap ? 'M' : 'L', plot_x(x, points[i].x), plot_y(y, points[i].mean),
                was_gap ? "h0" : "");
    }
    fprintf(f, "\"/>\n");
}

/* The area between the least and the most of each point. */
static void plot_band(FILE *f, const char *style, const PlotScale *x, const PlotScale *y, const CurvePoint *points,
                      int n) {
    fprintf(f, "<path class=\"%s\" d=\"", style);
    for (int begin = 0, end; begin < n; begin = end + 1) {
        for (end = begin; end < n && isfinite(points[end].mean); end++) {}
        for (int i = begin; i < end; i++)
            fprintf(f, "%c%.1f %.1f", i == begin ? 'M' : 'L', plot_x(x, points[i].x), plot_y(y, points[i].most));
        for (int i = end - 1; i >= begin; i--)
            fprintf(f, "L%.1f %.1f%s", plot_x(x, points[i].x), plot_y(y, points[i].least), i == begin ? "z" : "");
    }
    fprintf(f, "\"/>\n");
}

static void plot_dots(FILE *f, const char *style, const PlotScale *x, const PlotScale *y, const CurvePoint *points,
                      int n) {
    fprintf(f, "<path class=\"%s\" d=\"", style);
    for (int i = 0; i < n; i++)
        if (isfinite(points[i].mean))
            fprintf(f, "M%.1f %.1fh0", plot_x(x, points[i].x), plot_y(y, points[i].mean));
    fprintf(f, "\"/>\n");
}

// ---------------------------------------------------------------------------
// bars: rows of a name, a bar of parts, and a value

/* `style`: "" or long: long names have a line of their own on a phone. */
static void bars_open(FILE *f, const char *style) { fprintf(f, "<div class=\"bars %s\">\n", style); }
static void bars_close(FILE *f) { fprintf(f, "</div>\n"); }

/* Begins a row; parts follow, then bar_close. `name` is text, `title` what a pointer shows of it. */
static void bar_open(FILE *f, const char *name, const char *title) {
    fprintf(f, "<div class=\"n\" title=\"");
    page_text(f, title);
    fprintf(f, "\">");
    page_text(f, name);
    fprintf(f, "</div><div class=\"bar\">");
}

/* A part of `percent` of the width. `title`: no user's text. */
static void bar_part(FILE *f, const char *color, double percent, const char *title) {
    if (percent > 0)
        fprintf(f, "<i class=\"k-%s\" style=\"width:%.3f%%\" title=\"%s\"></i>", color, fmin(percent, 100), title);
}

/* A line across the bar. */
static void bar_limit(FILE *f, double percent, const char *title) {
    fprintf(f, "<i class=\"limit\" style=\"left:calc(%.3f%% - 1px)\" title=\"%s\"></i>", percent, title);
}

static void bar_close(FILE *f, const char *value) { fprintf(f, "</div><div class=\"v\">%s</div>\n", value); }

#endif
