// The page: theme and unit of the x axes, then charts and rollouts.

const system = matchMedia("(prefers-color-scheme: dark)");
const themeSelect = document.getElementById("theme");

function applyTheme() {
  document.documentElement.dataset.theme = themeSelect.value || (system.matches ? "dark" : "light");
}

function recolor() {
  applyTheme();
  drawAll();
}

applyTheme();
themeSelect.addEventListener("change", recolor);
system.addEventListener("change", recolor);
document.getElementById("x-unit").addEventListener("change", (event) => {
  unit = event.target.value;
  for (const chart of data.charts) if (chart.byProgress) draw(chart);
});
for (const details of document.querySelectorAll(".numbers")) {
  details.addEventListener("toggle", () => { if (details.open) showNumbers(details); });
}
prepareHistogram();
drawAll();
prepareBrowser().finally(() => { document.documentElement.dataset.ready = "yes"; });
