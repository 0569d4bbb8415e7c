"use strict";
(() => {
  const REACH = 26; // pixels within which a point or a line answers
  const NS = "http://www.w3.org/2000/svg";
  const SUPER = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

  function show(value, digits = 5) {
    if (!value) return "0";
    const size = Math.abs(value);
    if (size < 1e5 && size >= 1e-3) return String(Number(value.toPrecision(digits))).replace("-", "−");
    const [head, power] = value.toExponential(3).split("e");
    const raised = [...String(Number(power))].map((c) => SUPER[c]).join("");
    return `${Number(head) === 1 ? "" : `${Number(head)}×`}10${raised}`.replace("-", "−");
  }

  // Round values inside a range: powers of ten, 1-2-5 or even steps.
  function ticks(low, high, log) {
    const found = [];
    if (log && high / low >= 6) {
      const digits = high / low > 60 ? [1] : [1, 2, 5];
      for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++) {
        for (const d of digits) found.push(d * 10 ** p);
      }
    } else {
      const rough = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(rough));
      const step = [1, 2, 2.5, 5, 10].map((s) => s * unit).find((s) => s >= rough);
      for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(k * step);
    }
    return found.filter((v) => v >= low && v <= high);
  }

  class Axis {
    constructor(text, start, end) {
      Object.assign(this, JSON.parse(text), { start, end, zoom: 1, shift: 0 });
    }
    // The value at a coordinate of the drawing as it was before zooming.
    value(at) {
      const f = (at - this.start) / (this.end - this.start), [a, b] = this.limits;
      return this.log ? a * (b / a) ** f : a + f * (b - a);
    }
    place(value) {
      const [a, b] = this.limits;
      const f = this.log ? Math.log(value / a) / Math.log(b / a) : (value - a) / (b - a);
      return this.now(this.start + f * (this.end - this.start));
    }
    now(at) { return this.zoom * at + this.shift; }
    before(at) { return (at - this.shift) / this.zoom; }
    say(at) {
      const value = this.value(at);
      return this.names ? this.names[Math.round(value)] ?? "" : show(value);
    }
  }

  class Plot {
    constructor(svg) {
      this.svg = svg;
      this.tip = svg.parentNode.querySelector(".tip");
      this.reset = svg.parentNode.querySelector(".reset");
      const [left, top, right, bottom] = svg.dataset.box.split(" ").map(Number);
      this.box = { left, top, right, bottom };
      this.x = new Axis(svg.dataset.x, left, right);
      this.y = new Axis(svg.dataset.y, bottom, top);
      this.at = -1;
    }

    // Every place that can say something: points, ends of bars, corners of lines, before zooming.
    get spots() {
      if (this.known) return this.known;
      this.known = [];
      for (const group of this.svg.querySelectorAll(".points, .bars, .line")) {
        const kind = group.classList[0];
        const { n = "", runs = "", texts = "[]" } = group.dataset;
        const names = JSON.parse(texts), hashes = runs ? runs.split(" ") : [];
        this.places(group, kind).forEach(([x, y], i) => {
          const run = (hashes[i] ?? "-") === "-" ? "" : hashes[i];
          this.known.push({ x, y, kind, group, run, name: n, text: names[i] ?? "" });
        });
      }
      return this.known;
    }

    places(group, kind) {
      if (kind === "points") {
        return [...group.querySelectorAll("use")].map((u) => [+u.getAttribute("x"), +u.getAttribute("y")]);
      }
      const path = group.querySelector("path");
      const all = [...(path?.getAttribute("d") ?? "").matchAll(/(-?[\d.]+) (-?[\d.]+)/g)].map((m) => [+m[1], +m[2]]);
      if (kind === "line") return all;
      const ends = []; // a bar is base, end, end, base
      for (let i = 0; i + 3 < all.length; i += 4) {
        ends.push([(all[i + 1][0] + all[i + 2][0]) / 2, (all[i + 1][1] + all[i + 2][1]) / 2]);
      }
      return ends;
    }

    visible(spot) {
      const x = this.x.now(spot.x), y = this.y.now(spot.y), { left, right, top, bottom } = this.box;
      return !spot.group.classList.contains("off") && x > left - 3 && x < right + 3 && y > top - 3 && y < bottom + 3;
    }

    say(spot) {
      this.svg.querySelector(".halo")?.remove();
      if (!spot) { this.tip.hidden = true; return; }
      const x = this.x.now(spot.x), y = this.y.now(spot.y);
      const halo = document.createElementNS(NS, "circle");
      for (const [key, value] of Object.entries({ cx: x, cy: y, r: 4.5, class: "halo" })) halo.setAttribute(key, value);
      this.svg.append(halo);
      const lines = [spot.name, spot.text, `${this.x.label}: ${this.x.say(spot.x)}`, `${this.y.label}: ${this.y.say(spot.y)}`];
      if (spot.run) lines.push(`run ${spot.run}`);
      this.tip.textContent = lines.filter(Boolean).join("\n");
      this.tip.className = `tip ${(spot.group.className.baseVal.match(/\bk\d+\b/) || [""])[0]}`;
      this.tip.hidden = false;
      const frame = this.svg.getBoundingClientRect(), scale = frame.width / this.svg.viewBox.baseVal.width;
      const offset = frame.top - this.svg.parentNode.getBoundingClientRect().top;
      const wide = this.tip.offsetWidth, tall = this.tip.offsetHeight;
      this.tip.style.left = `${Math.max(0, Math.min(x * scale + 14, frame.width - wide))}px`;
      this.tip.style.top = `${offset + (y * scale - tall - 12 > -40 ? y * scale - tall - 12 : y * scale + 16)}px`;
    }

    inside(event) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(this.svg.getScreenCTM().inverse());
      return [at.x, at.y];
    }

    nearest(event) {
      const [x, y] = this.inside(event), reach = REACH / this.svg.getScreenCTM().a;
      let best = null, least = reach;
      for (const spot of this.spots) {
        if (!this.visible(spot)) continue;
        // A measured point wins over the line through it.
        const distance = Math.hypot(this.x.now(spot.x) - x, this.y.now(spot.y) - y) + (spot.kind === "line" ? 0.3 * reach : 0);
        if (distance < least) [best, least] = [spot, distance];
      }
      return best;
    }

    // Show the rectangle between two corners (as drawn now); without one, everything.
    zoomTo(corners) {
      const [x, y] = [this.x, this.y], whole = !corners;
      this.spots; // read before the coordinates change
      for (const [axis, i] of [[x, 0], [y, 1]]) {
        if (whole) { Object.assign(axis, { zoom: 1, shift: 0 }); continue; }
        const [a, b] = corners.map((corner) => axis.before(corner[i])).sort((p, q) => (p - q) * Math.sign(axis.end - axis.start));
        axis.zoom = (axis.end - axis.start) / (b - a);
        axis.shift = axis.start - axis.zoom * a;
      }
      for (const mark of this.svg.querySelectorAll(".marks use")) {
        mark.first ??= [+mark.getAttribute("x"), +mark.getAttribute("y")];
        mark.setAttribute("x", x.now(mark.first[0])); mark.setAttribute("y", y.now(mark.first[1]));
      }
      for (const path of this.svg.querySelectorAll(".marks > g > path")) {
        path.first ??= path.getAttribute("d");
        path.setAttribute("d", path.first.replace(/(-?[\d.]+) (-?[\d.]+)/g, (_, a, b) => `${x.now(+a)} ${y.now(+b)}`));
      }
      this.svg.classList.toggle("zoomed", !whole);
      this.reset.hidden = whole;
      this.svg.querySelector(".zoom-ticks")?.remove();
      if (!whole) this.drawTicks();
      this.say(null);
    }

    drawTicks() {
      const group = document.createElementNS(NS, "g"), { left, right, top, bottom } = this.box;
      group.setAttribute("class", "zoom-ticks");
      const add = (axis, low, high, draw) => {
        const ends = [axis.value(axis.before(low)), axis.value(axis.before(high))].sort((a, b) => a - b);
        const values = axis.names ? axis.names.map((_, i) => i).filter((i) => i >= ends[0] && i <= ends[1]) : ticks(...ends, axis.log);
        for (const value of values) draw(axis.place(value), axis.names ? axis.names[value] : show(value));
      };
      const put = (d, x, y, anchor, words) => {
        const path = document.createElementNS(NS, "path"), text = document.createElementNS(NS, "text");
        path.setAttribute("d", d); text.setAttribute("x", x); text.setAttribute("y", y);
        text.setAttribute("text-anchor", anchor); text.textContent = words;
        group.append(path, text);
      };
      add(this.x, left, right, (at, words) => put(`M${at} ${bottom}v2.8`, at, bottom + 10.5, "middle", words));
      add(this.y, bottom, top, (at, words) => put(`M${left} ${at}h-2.8`, left - 4.8, at + 2.8, "end", words));
      this.svg.append(group);
    }

    open(spot) { if (spot?.run) openRun(spot.run); }

    listen() {
      const { svg } = this;
      let start = null, band = null;
      svg.setAttribute("tabindex", "0");
      svg.addEventListener("pointerdown", (event) => {
        this.say(this.nearest(event));
        if (event.pointerType === "mouse" && event.button === 0) start = this.inside(event);
      });
      svg.addEventListener("pointermove", (event) => {
        if (!start) { this.say(this.nearest(event)); return; }
        const [x, y] = this.inside(event);
        band ??= svg.appendChild(Object.assign(document.createElementNS(NS, "rect")));
        const shape = { x: Math.min(x, start[0]), y: Math.min(y, start[1]), width: Math.abs(x - start[0]), height: Math.abs(y - start[1]), class: "rubber" };
        for (const [key, value] of Object.entries(shape)) band.setAttribute(key, value);
        event.preventDefault();
      });
      const release = (event) => {
        const [from, to] = [start, start && this.inside(event)];
        band?.remove(); start = band = null;
        if (!from) return;
        if (Math.abs(from[0] - to[0]) > 5 && Math.abs(from[1] - to[1]) > 5) this.zoomTo([from, to]);
        else if (event.type === "pointerup") this.open(this.nearest(event));
      };
      svg.addEventListener("pointerup", release);
      svg.addEventListener("pointerleave", (event) => { if (!start) this.say(null); else release(event); });
      svg.addEventListener("dblclick", () => this.zoomTo(null));
      this.reset.addEventListener("click", () => this.zoomTo(null));
      svg.addEventListener("blur", () => this.say(null));
      svg.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        const points = this.spots.filter((spot) => spot.kind !== "line" && this.visible(spot));
        if (event.key === "Enter") this.open(points[this.at]);
        if (event.key === "Escape") { this.zoomTo(null); svg.blur(); }
        if (!step || !points.length) return;
        event.preventDefault();
        this.at = (Math.max(this.at, step > 0 ? -1 : 0) + step + points.length) % points.length;
        this.say(points[this.at]);
      });
    }
  }

  function openRun(run) {
    const target = document.getElementById(`run-${run}`);
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView({ block: "start" });
    target.querySelector("summary").focus();
  }

  for (const svg of document.querySelectorAll(".plot > svg")) new Plot(svg).listen();

  // A click on a name hides or shows its curve in every panel of the figure; a double click shows it alone.
  for (const figure of document.querySelectorAll("figure")) {
    const names = [...figure.querySelectorAll(".legend button")];
    const draw = () => {
      const off = new Set(names.filter((b) => b.getAttribute("aria-pressed") === "false").map((b) => b.dataset.c));
      for (const mark of figure.querySelectorAll(".marks > [data-c]")) mark.classList.toggle("off", off.has(mark.dataset.c));
    };
    for (const button of names) {
      button.addEventListener("click", () => {
        button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") === "false"));
        draw();
      });
      button.addEventListener("dblclick", () => {
        const alone = names.every((b) => b === button || b.getAttribute("aria-pressed") === "false");
        names.forEach((b) => b.setAttribute("aria-pressed", String(alone || b === button)));
        draw();
      });
    }
  }

  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.querySelectorAll("th")];
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
      const rising = head.getAttribute("aria-sort") !== "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", rising ? "ascending" : "descending");
      const body = table.tBodies[0];
      const value = (row) => row.cells[column].dataset.v;
      const missing = (text) => text === "" || text === "nan";
      const numbers = [...body.rows].map(value).every((text) => missing(text) || !Number.isNaN(Number(text)));
      const rows = [...body.rows].sort((a, b) => {
        const [x, y] = [value(a), value(b)];
        if (missing(x) || missing(y)) return missing(x) - missing(y); // what is missing comes last, either way
        const order = numbers ? Number(x) - Number(y) : x.localeCompare(y);
        return rising ? order : -order;
      });
      body.append(...rows);
    }));
  }

  // Specs and records are written compactly, and indented when they are first seen.
  for (const details of document.querySelectorAll("details")) {
    details.addEventListener("toggle", () => {
      for (const text of details.querySelectorAll(":scope > pre.json, :scope > .pair pre.json")) {
        text.textContent = JSON.stringify(JSON.parse(text.textContent), null, 1);
        text.classList.remove("json");
      }
    });
  }

  const follow = () => { if (location.hash.startsWith("#run-")) openRun(location.hash.slice(5)); };
  addEventListener("hashchange", follow);
  follow();
})();
