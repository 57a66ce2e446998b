// Charts: fills in the colors of the theme and the x values of the unit that the reader chose, then lets plotly draw.

const data = JSON.parse(document.getElementById("data").textContent);

const UNITS = {
  step: "step", seconds: "seconds of training", samples: "rollouts sampled", unique_tokens: "tokens computed",
};
const drawn = new Map(); // name -> element, of the charts that plotly has drawn
let unit = "step";

const theme = () => THEMES[document.documentElement.dataset.theme];

function colorOf(role) {
  const [kind, value] = role.split(":");
  const colors = theme();
  if (kind === "sequence") {
    const at = Number(value) * (colors.sequence.length - 1);
    const from = Math.min(Math.floor(at), colors.sequence.length - 2);
    const [a, b] = [0, 1].map((i) => [1, 3, 5].map((c) => parseInt(colors.sequence[from + i].slice(c, c + 2), 16)));
    return `rgb(${a.map((c, i) => Math.round(c + (b[i] - c) * (at - from))).join(",")})`;
  }
  return (kind === "stage" ? colors.stage : colors.run)[Number(value) % 8];
}

function finished(trace, byProgress) {
  const color = colorOf(trace.meta.color);
  const made = { ...trace, marker: { size: 6, ...trace.marker, color: color } };
  if (trace.type !== "bar") made.line = { ...trace.line, color: color };
  if (trace.stackgroup) made.fillcolor = color;
  if (trace.error_y) made.error_y = { ...trace.error_y, color: color };
  if (byProgress) {
    const along = data.runs[trace.meta.run].x[unit];
    made.x = trace.meta.at.map((at) => along[at]);
  }
  return made;
}

function eventMarks(chart) {
  if (!chart.marks) return [];
  return data.runs.flatMap((run, i) => run.marks.map(({ at, label }, n) => ({
    type: "line", yref: "paper", y0: 0, y1: 1, x0: run.x[unit][at], x1: run.x[unit][at], layer: "below",
    name: data.runs.length > 1 ? `${run.plotlyName} · ${label}` : label,
    showlegend: run.marks.findIndex((mark) => mark.label === label) === n,
    line: { width: 1.2, dash: "dot", color: data.runs.length > 1 ? colorOf(`run:${i}`) : theme().soft },
  })));
}

function layoutOf(chart) {
  const colors = theme();
  const axis = { gridcolor: colors.line, zerolinecolor: colors.line, linecolor: colors.line, automargin: true };
  const given = chart.layout;
  const last = Math.max(...data.runs.map((run) => run.x[unit].at(-1)), 1e-9); // the same for all charts
  const progress = chart.byProgress ? { title: { text: UNITS[unit] }, range: [-0.015 * last, 1.015 * last] } : {};
  const shapes = (given.shapes || []).map((s) => ({ ...s, line: { ...s.line, color: colors.soft } }));
  return {
    ...given,
    font: { family: "system-ui, sans-serif", size: 12, color: colors.soft },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 58, r: 12, t: 8, b: 44 },
    showlegend: true,
    legend: { traceorder: "normal", orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11.5 } },
    hovermode: chart.traces[0].type === "bar" || chart.traces[0].mode === "markers" && !chart.byProgress ? "closest" : "x unified",
    hoverlabel: { bgcolor: colors.card, bordercolor: colors.line, font: { color: colors.ink } },
    xaxis: { ...axis, showgrid: false, ...progress, ...given.xaxis },
    yaxis: { ...axis, exponentformat: "power", minexponent: 5, ...given.yaxis, title: { ...given.yaxis.title, standoff: 10 } },
    shapes: [...shapes, ...eventMarks(chart)],
  };
}

// No button bar: one of plotly's buttons sends the chart to its server. Drag to zoom; double-click to zoom out.
const PLOTLY_OPTIONS = { responsive: true, displayModeBar: false, showSendToCloud: false, plotlyServerURL: "" };

function draw(chart) {
  const element = document.getElementById(`chart-${chart.name}`);
  const traces = chart.traces.map((trace) => finished(trace, chart.byProgress));
  Plotly.react(element, traces, layoutOf(chart), PLOTLY_OPTIONS);
  drawn.set(chart.name, element);
  refreshNumbers(chart.name);
}

function histogramChart(place) {
  // Each run shows its last step up to the one chosen.
  const steps = histogramSteps();
  const step = steps[place];
  const traces = data.histogram.runs.flatMap((run, i) => {
    const at = run.steps.findLastIndex((s) => s <= step);
    if (at < 0) return [];
    return [{
      type: "bar", name: data.runs.length > 1 ? data.runs[i].plotlyName : "prompts", x: data.histogram.labels, y: run.counts[at],
      meta: { run: i, color: `run:${i}` }, hovertemplate: "%{y} prompts<extra></extra>",
    }];
  });
  const most = Math.max(...data.histogram.runs.flatMap((run) => run.counts.flat()));
  const layout = {
    bargap: 0.15, xaxis: { type: "category", title: { text: data.histogram.unit } },
    yaxis: { title: { text: "prompts" }, range: [0, most * 1.05] },
  };
  return { name: "success", traces, layout, byProgress: false, marks: false };
}

const histogramSteps = () => [...new Set(data.histogram.runs.flatMap((run) => run.steps))].sort((a, b) => a - b);

function drawHistogram() {
  const slider = document.getElementById("histogram-step");
  const place = Number(slider.value);
  const step = histogramSteps()[place];
  document.getElementById("histogram-output").textContent = `step ${step}`;
  slider.setAttribute("aria-valuetext", `step ${step}`);
  draw(histogramChart(place));
}

function prepareHistogram() {
  if (!data.histogram) return;
  const slider = document.getElementById("histogram-step");
  slider.max = String(histogramSteps().length - 1);
  slider.value = slider.max;
  slider.addEventListener("input", drawHistogram);
}

function drawAll() {
  for (const chart of data.charts) draw(chart);
  if (data.histogram) drawHistogram();
  for (const swatch of document.querySelectorAll(".swatch")) {
    swatch.style.background = colorOf(`run:${swatch.dataset.run}`);
  }
}

// The numbers under a chart: what plotly was given, as a table; made when it is opened.
function refreshNumbers(name) {
  const details = document.querySelector(`.numbers[data-chart="${name}"]`);
  if (details?.open) showNumbers(details);
}

function showNumbers(details) {
  const { data: traces } = drawn.get(details.dataset.chart);
  const rows = traces.flatMap((t) => t.x.map((x, i) => {
    const [low, high] = t.error_y ? [t.y[i] - t.error_y.arrayminus[i], t.y[i] + t.error_y.array[i]] : ["", ""];
    return [t.name || "", x, t.y[i], low, high];
  }));
  const intervals = traces.some((t) => t.error_y);
  const table = document.createElement("table");
  const add = (cells, tag) => {
    const row = table.insertRow();
    for (const cell of intervals ? cells : cells.slice(0, 3)) {
      const made = document.createElement(tag);
      made.textContent = typeof cell === "number" ? String(Number(cell.toPrecision(6))) : unescaped(cell);
      row.append(made);
    }
  };
  add(["", "x", "y", "from", "to"], "th");
  for (const row of rows) add(row, "td");
  const box = document.createElement("div");
  box.className = "scroll";
  box.tabIndex = 0;
  box.append(table);
  details.querySelector(".scroll")?.remove();
  details.append(box);
}

const unescaped = (text) => text.replaceAll("&lt;", "<").replaceAll("&gt;", ">").replaceAll("&amp;", "&");
