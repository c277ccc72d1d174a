// Draws each `.plot` of the page with uPlot from the JSON in it; what a reader chose outlives a reload of the page.
(() => {
const INCIDENT = "incident", SAVE = "checkpoint", BEST = "best checkpoint", RESUME = "resumed";
const WHOLE = [...Array(10).keys()].flatMap(power => [1, 2, 5].map(digit => digit * 10 ** power));  // of steps
const DASHES = [[], [10, 6], [2, 5], [12, 5, 2, 5]];
const chosen = JSON.parse(stored() || '{"smoothing": 0, "log": {}}');
const color = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const paint = { [INCIDENT]: "--bad", [SAVE]: "--soft", [BEST]: "--good", [RESUME]: "--c3" };
let charts = [];

function stored(text) {  // a browser may refuse storage to files
  const key = location.pathname;
  try { return text ? sessionStorage.setItem(key, text) : sessionStorage.getItem(key); } catch { return null; }
}

// Mean of what came before, weighted by powers of `strength` and corrected for its start.
function smoothed(values, strength) {
  let mean = 0, weight = 0;
  return values.map(value => {
    if (value == null) return value;
    mean = strength * mean + (1 - strength) * value;
    weight = strength * weight + 1 - strength;
    return mean / weight;
  });
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e4) {
    const power = Math.min(4, Math.floor(Math.log10(size) / 3 + 1e-9));
    return +(value / 10 ** (3 * power)).toPrecision(4) + ["", " k", " M", " B", " T"][power];
  }
  return size > 0 && size < 1e-3 ? (+value.toPrecision(4)).toExponential().replace("e-", "e−") : String(+value.toPrecision(5));
}

const escaped = text => String(text).replace(/[&<>]/g, one => `&#${one.charCodeAt()};`);
const stroke = (curve, i) => color(`--c${(curve.color ?? i) % 8}`);

function sign(kind) {  // as it is drawn in the chart
  const fill = `var(${paint[kind] || "--text"})`;
  const shape = kind == RESUME || !(kind in paint) ? `<path d="M6 0V12" stroke="${fill}" stroke-width="2" stroke-dasharray="3 2"/>`
    : kind == INCIDENT ? `<circle cx="6" cy="6" r="4" fill="${fill}"/>` : `<path d="M1 11L6 2L11 11Z" fill="${fill}"/>`;
  return `<svg width="12" height="12">${shape}</svg>`;
}

function drawMarks(u, marks) {
  const { ctx } = u, { left, top, width, height } = u.bbox, size = devicePixelRatio;
  ctx.save();
  for (const { step, kind } of marks) {
    const x = u.valToPos(step, "x", true), low = top + height;
    if (x < left - 1 || x > left + width + 1) continue;
    ctx.strokeStyle = ctx.fillStyle = color(paint[kind] || "--text");
    ctx.lineWidth = 1.5 * size;
    ctx.beginPath();
    if (kind == SAVE || kind == BEST) {
      ctx.moveTo(x - 5 * size, low); ctx.lineTo(x, low - 9 * size); ctx.lineTo(x + 5 * size, low);
      ctx.fill();
    } else {
      ctx.setLineDash(kind == INCIDENT ? [] : [4 * size, 3 * size]);
      ctx.globalAlpha = kind == INCIDENT ? 0.45 : 0.9;
      ctx.moveTo(x, top); ctx.lineTo(x, low); ctx.stroke();
      ctx.globalAlpha = 1;
      if (kind == INCIDENT) { ctx.beginPath(); ctx.arc(x, top + 4 * size, 4 * size, 0, 7); ctx.fill(); }
    }
  }
  ctx.restore();
}

function showTip(u, tip, spec) {
  const { left, top, idx } = u.cursor;
  if (idx == null || left < 0 || !(u.over.matches(":hover") || u.touched)) { tip.hidden = true; return; }
  const x = u.data[0][idx], rows = [];
  spec.curves.forEach((curve, i) => {
    const value = u.data[i + 1][idx];
    if (value != null) rows.push(`<i style="background:${stroke(curve, i)}"></i>${escaped(curve.text?.[idx] ?? curve.name)} <b>${short(value)}</b>`);
  });
  const near = Math.abs(u.posToVal(8, "x") - u.posToVal(0, "x"));
  for (const mark of spec.marks)
    if (Math.abs(mark.step - x) <= near) rows.push(`${sign(mark.kind)} ${mark.step}: ${escaped(mark.text || mark.kind)}`);
  tip.innerHTML = [`<b>${escaped(spec.xname)} ${spec.labels ? escaped(spec.labels[x] ?? "") : x}</b>`, ...rows].join("<br>");
  tip.hidden = false;
  const right = left + tip.offsetWidth + 24 > u.over.clientWidth;
  tip.style.left = `${Math.max(0, right ? left - tip.offsetWidth - 12 : left + 12)}px`;
  tip.style.top = `${Math.max(0, Math.min(top + 8, u.over.clientHeight - tip.offsetHeight))}px`;
}

function draw(plot) {
  const spec = plot.spec ??= JSON.parse(plot.firstElementChild.textContent);
  const events = [...new Set(spec.marks.map(mark => mark.step))].sort((one, other) => one - other);  // in view without a value too
  const joined = uPlot.join([...spec.curves.map(curve => [curve.x, curve.y]), [events, events.map(() => null)]]).slice(0, -1);
  const strength = spec.smooth ? chosen.smoothing : 0;
  const data = [joined[0], ...joined.slice(1).map(values => smoothed(values, strength)), ...strength ? joined.slice(1) : []];
  const points = spec.points ? { show: true, size: 8 } : { size: 5 };
  const line = (curve, i, alpha) => ({
    label: curve.name, stroke: stroke(curve, i), alpha, dash: DASHES[(curve.dash || 0) % 4],
    width: spec.points && !curve.line ? 0 : curve.width || 2, paths: curve.line == "steps" ? uPlot.paths.stepped({ align: 1 }) : undefined,
    points: { ...points, ...curve.line == "steps" ? { show: false } : {}, fill: stroke(curve, i), stroke: stroke(curve, i) },
  });
  const tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
  const axis = { stroke: color("--soft"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
  const named = label => ({ label, labelSize: 16, labelGap: 0, labelFont: "12px system-ui" });
  const isLog = chosen.log[spec.title] && joined.slice(1).flat().some(value => value > 0);
  const names = (u, ticks) => ticks.map(tick => tick == null ? "" : short(tick));
  const categories = (u, ticks) => ticks.map(tick => spec.labels[tick] ?? "");
  const u = new uPlot({
    width: plot.clientWidth, height: spec.height, legend: { show: false }, padding: [8, 16, 0, 0],
    scales: { x: { time: false, distr: spec.log_x ? 3 : 1, range: spec.labels && (() => [-0.5, spec.labels.length - 0.5]) }, y: { distr: isLog ? 3 : 1 } },
    axes: [
      { ...axis, ...named(spec.xname), size: 26, gap: 4, space: 60, values: names, ...spec.xname == "step" && { incrs: WHOLE }, ...spec.labels && { values: categories, incrs: [1] } },
      { ...axis, ...named(spec.title.split(", ").pop().toLowerCase()), size: 56, gap: 6, space: 28, values: names },
    ],
    series: [{}, ...spec.curves.map((curve, i) => line(curve, i, 1)), ...strength ? spec.curves.map((curve, i) => line(curve, i, 0.25)) : []],
    cursor: { y: false, focus: { prox: 30 }, drag: { x: true, y: false }, ...spec.xname == "step" && { sync: { key: "step", scales: ["x", null] } } },
    hooks: { draw: [u => drawMarks(u, spec.marks)], setCursor: [u => showTip(u, tip, spec)] },
  }, data, plot);
  u.over.append(tip);
  const touch = event => {
    const box = u.over.getBoundingClientRect(), [finger] = event.touches;
    u.touched = true;
    u.setCursor({ left: finger.clientX - box.left, top: finger.clientY - box.top });
  };
  u.over.addEventListener("touchstart", touch, { passive: true });
  u.over.addEventListener("touchmove", touch, { passive: true });
  u.over.addEventListener("mouseleave", () => { tip.hidden = true; });
  plot.chart = u;
  return u;
}

function drawAll() {
  charts.forEach(chart => chart.destroy());
  charts = [...document.querySelectorAll(".plot")].map(draw);
  document.querySelectorAll("button").forEach(button => {
    const { smoothing, log } = button.dataset;
    button.setAttribute("aria-pressed", log ? Boolean(chosen.log[log]) : Number(smoothing) == chosen.smoothing);
  });
}

function legend(plot) {
  const { curves, marks, explains } = plot.spec, lines = curves.length > 1 || explains ? curves : [];
  const swatch = (curve, i) => `<svg width="24" height="8"><path d="M0 4H24" stroke="var(--c${(curve.color ?? i) % 8})"
    stroke-width="3" stroke-dasharray="${DASHES[(curve.dash || 0) % 4].map(part => part * 0.7)}"/></svg>`;
  const shown = lines.map((curve, i) => `<span>${swatch(curve, i)}${escaped(curve.name)}</span>`);
  for (const kind of explains ? new Set(marks.map(mark => mark.kind)) : []) shown.push(`<span>${sign(kind)}${escaped(kind)}</span>`);
  if (shown.length) plot.insertAdjacentHTML("afterend", `<div class="legend">${shown.join("")}</div>`);
}

drawAll();
charts.forEach(chart => legend(chart.root.parentElement));
document.addEventListener("click", ({ target: { dataset } }) => {
  if (dataset.log) chosen.log[dataset.log] = !chosen.log[dataset.log];
  else if (dataset.smoothing) chosen.smoothing = Number(dataset.smoothing);
  else return;
  stored(JSON.stringify(chosen));
  drawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth != width) charts.forEach(chart => chart.setSize({ width: chart.root.parentElement.clientWidth, height: chart.height }));
  width = innerWidth;
});
})();
