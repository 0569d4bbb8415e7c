"use strict";
(() => {
  const REACH = 26; // pixels within which a point or a line answers

  // Every place of a figure that can say something, with its coordinates in the drawing.
  function spots(svg) {
    const found = [];
    for (const point of svg.querySelectorAll(".point")) {
      const box = point.firstElementChild.getBBox();
      const shade = point.parentNode.className.baseVal;
      found.push({ x: box.x + box.width / 2, y: box.y + box.height / 2, text: point.dataset.text, shade, point });
    }
    const [xName, yName] = [svg.parentNode.dataset.x, svg.parentNode.dataset.y];
    for (const line of svg.querySelectorAll("polyline.line")) {
      const values = line.dataset.v.split("|");
      Array.from(line.points).forEach((at, i) => {
        const [x, y] = values[i].split(";");
        const text = `${line.dataset.label}\n${xName}: ${x}\n${yName}: ${y}`;
        found.push({ x: at.x, y: at.y, text, shade: line.className.baseVal });
      });
    }
    return found;
  }

  function show(svg, tip, spot) {
    svg.querySelectorAll(".point.on").forEach((point) => point.classList.remove("on"));
    if (!spot) { tip.hidden = true; return; }
    if (spot.point) spot.point.classList.add("on");
    tip.textContent = spot.text;
    tip.className = `tip ${(spot.shade.match(/\bk\d+\b/) || [""])[0]}`;
    tip.hidden = false;
    const scale = svg.getScreenCTM().a;
    const wide = tip.offsetWidth, tall = tip.offsetHeight, room = svg.clientWidth;
    const x = spot.x * scale, y = spot.y * scale;
    tip.style.left = `${Math.max(0, Math.min(x + 14, room - wide))}px`;
    tip.style.top = `${y - tall - 12 > -30 ? y - tall - 12 : y + 16}px`;
  }

  function open(run) {
    const target = run && document.getElementById(`run-${run}`);
    if (!target) return;
    for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
    target.scrollIntoView({ block: "start" });
    target.querySelector("summary").focus();
  }

  for (const svg of document.querySelectorAll(".plot svg")) {
    const tip = svg.closest(".plot").querySelector(".tip");
    const points = [...svg.querySelectorAll(".point")];
    points.forEach((point, i) => {
      const title = point.querySelector("title");
      point.dataset.text = title.textContent;
      title.remove(); // or the browser's own tooltip would come on top of ours
      point.setAttribute("role", "img");
      point.setAttribute("aria-label", point.dataset.text.replaceAll("\n", ", "));
      point.setAttribute("tabindex", i === 0 ? "0" : "-1"); // one stop per figure; arrows walk its points
      point.addEventListener("focus", () => {
        points.forEach((other) => other.setAttribute("tabindex", other === point ? "0" : "-1"));
        show(svg, tip, spots(svg).find((spot) => spot.point === point));
      });
      point.addEventListener("blur", () => show(svg, tip, null));
      point.addEventListener("click", () => open(point.dataset.run));
      point.addEventListener("keydown", (event) => {
        const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
        if (event.key === "Enter") open(point.dataset.run);
        if (event.key === "Escape") point.blur();
        if (!step) return;
        event.preventDefault();
        points[(i + step + points.length) % points.length].focus();
      });
    });
    const seek = (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const reach = REACH / svg.getScreenCTM().a;
      let best = null, least = reach;
      for (const spot of spots(svg)) {
        // A measured point wins over the line through it.
        const distance = Math.hypot(spot.x - at.x, spot.y - at.y) + (spot.point ? 0 : 0.3 * reach);
        if (distance < least) [best, least] = [spot, distance];
      }
      show(svg, tip, best);
    };
    svg.addEventListener("pointermove", seek);
    svg.addEventListener("pointerdown", seek);
    svg.addEventListener("pointerleave", () => show(svg, tip, null));
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

  const follow = () => { if (location.hash.startsWith("#run-")) open(location.hash.slice(5)); };
  addEventListener("hashchange", follow);
  follow();
})();
