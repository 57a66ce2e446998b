// The tree of a prompt's rollouts: drawn as a whole, and as a list to unfold.

// A run of tokens: from a node down to where rollouts part, one of them ends, or a result begins or ends.
function tokenRun(group, start) {
  const nodes = [start];
  let node = start;
  while (group.children[node].length === 1 && !group.ending[node].length
    && group.count[group.children[node][0]] === group.count[node] && group.given[group.children[node][0]] === group.given[node]) {
    [node] = group.children[node];
    nodes.push(node);
  }
  return nodes;
}

function runText(group, nodes) {
  return nodes.map((node) => group.data.tokenTexts[group.token[node]]).join("");
}

const byCount = (group, nodes) => [...nodes].sort((a, b) => group.count[b] - group.count[a] || a - b);

function branches(group, starts, total, from) {
  const list = element("ul");
  const ordered = byCount(group, starts);
  for (const start of ordered.slice(from, from + MORE)) list.append(element("li", "", branch(group, start)));
  const left = ordered.length - from - MORE;
  if (left > 0) {
    const more = element("button", "", `show ${Math.min(left, MORE)} more of ${left} branches`);
    more.addEventListener("click", () => {
      const next = branches(group, starts, total, from + MORE);
      more.parentElement.replaceWith(...next.children);
    });
    list.append(element("li", "", more));
  }
  return list;
}

function branch(group, start) {
  const nodes = tokenRun(group, start);
  const end = nodes.at(-1);
  const children = group.children[end];
  const line = branchLine(group, nodes);
  const endings = group.ending[end];
  const below = group.count[end] - children.reduce((sum, c) => sum + group.count[c], 0)
    - endings.reduce((sum, i) => sum + group.leafCount[i], 0);
  if (!children.length) {
    const leaf = element("div", "end", ...line, ...endings.map((i) => badge(group, i)));
    leaf.dataset.node = start;
    return leaf;
  }
  const details = element("details", "", element("summary", "", ...line));
  details.dataset.node = start;
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("ul")) return;
    const list = branches(group, children, group.count[end], 0);
    for (const i of endings) list.prepend(element("li", "", element("div", "end", count(group.leafCount[i], group), "ends here", badge(group, i))));
    if (below > 0) list.append(element("li", "", element("div", "end", count(below, group), "in rarer responses, not on this page")));
    details.append(list);
  });
  return details;
}

const count = (number, group) => element("span", "count", `${number}/${group.rollouts}`);

const fractionBelow = (group, node) => group.rightBelow[node] / Math.max((group.verifiedBelow ?? group.count)[node], 1);

function branchLine(group, nodes) {
  const end = nodes.at(-1);
  const fraction = fractionBelow(group, end);
  const fill = element("b");
  fill.style.width = `${100 * group.count[end] / group.rollouts}%`;
  fill.style.background = fractionColor(fraction);
  const bar = element("span", "bar", fill);
  bar.title = `${percent(fraction)} of these rollouts are correct`;
  const shown = tokenSpans(group, nodes.slice(0, 60), false, group.given[end] ? "marked" : "kept");
  if (nodes.length > 60) shown.push(element("span", "special", `… ${nodes.length - 60} more tokens`));
  const given = group.given[end] ? [element("span", "key given", "result")] : [];
  return [bar, count(group.count[end], group), ...given, element("span", "text", ...shown)];
}

function badge(group, i) {
  const kind = group.correct[i] ? "right" : group.finished[i] && !group.unverified[i] ? "wrong" : "cut";
  return element("span", `badge ${kind}`, plain(group.reason[i]));
}

// Opens the most frequent branches first, as long as the outline stays short.
function unfold(outline) {
  let rows = outline.querySelectorAll("li").length;
  for (;;) {
    const closed = [...outline.querySelectorAll("details:not([open])")].filter((d) => !d.dataset.left);
    if (!closed.length || rows > 14) return;
    const widest = closed.reduce((a, b) => (Number.parseInt(b.querySelector(".count").textContent) > Number.parseInt(a.querySelector(".count").textContent) ? b : a));
    openNow(widest);
    rows = outline.querySelectorAll("li").length;
  }
}

function openNow(details) {
  details.open = true;
  details.dispatchEvent(new Event("toggle")); // the browser's own event comes too late to continue into what it adds
}

function drawIcicle(group, outline, available) {
  const ns = "http://www.w3.org/2000/svg";
  const box = element("div");
  const width = Math.max(available, 240);
  const height = 260;
  const deepest = group.depth.reduce((a, b) => Math.max(a, b), 0) + 1;
  const svg = document.createElementNS(ns, "svg");
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", "icicle");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `tree of ${group.rollouts} rollouts, from the left; the list below contains the same`);
  const x = (depth) => (depth / deepest) * width;
  const stack = [];
  let top = 0;
  for (const start of byCount(group, group.roots)) {
    stack.push([start, top]);
    top += group.count[start];
  }
  while (stack.length) {
    const [start, y] = stack.pop();
    const nodes = tokenRun(group, start);
    const end = nodes.at(-1);
    const tall = (group.count[end] / group.rollouts) * height;
    if (tall < 0.8) continue;
    const rect = document.createElementNS(ns, "rect");
    const left = x(group.depth[start]);
    const wide = x(group.depth[end] + 1) - left;
    const fraction = fractionBelow(group, end);
    for (const [name, value] of Object.entries({ x: left, y: (y / group.rollouts) * height, width: wide, height: tall })) {
      rect.setAttribute(name, value.toFixed(2));
    }
    if (group.given[end]) rect.setAttribute("class", "given");
    else rect.style.fill = fractionColor(fraction);
    const label = plain((group.given[end] ? "result: " : "") + runText(group, nodes.slice(0, 80)));
    const title = document.createElementNS(ns, "title");
    title.textContent = `${label}\n${group.count[end]} of ${group.rollouts} rollouts, ${percent(fraction)} of them correct`;
    rect.append(title);
    rect.addEventListener("click", () => reveal(group, start, outline));
    svg.append(rect);
    if (tall > 12 && wide > 12) {
      const text = document.createElementNS(ns, "text");
      const fits = Math.floor((wide - 6) / 6.8);
      text.setAttribute("x", (left + 4).toFixed(2));
      text.setAttribute("y", ((y / group.rollouts) * height + Math.min(tall / 2 + 4, 18)).toFixed(2));
      text.textContent = label.length > fits ? `${label.slice(0, Math.max(fits - 1, 0))}…` : label;
      svg.append(text);
    }
    let down = y + group.ending[end].reduce((sum, i) => sum + group.leafCount[i], 0);
    for (const child of byCount(group, group.children[end])) {
      stack.push([child, down]);
      down += group.count[child];
    }
  }
  box.append(svg);
  return box;
}

// Opens the outline down to a node and points at it.
function reveal(group, start, outline) {
  const path = [];
  for (let node = start; node >= 0; node = group.parent[node]) path.unshift(node);
  let target = null;
  for (const node of path) {
    const row = outline.querySelector(`[data-node="${node}"]`);
    if (!row) continue;
    target = row;
    if (row.tagName === "DETAILS" && node !== start && !row.open) openNow(row);
  }
  for (const old of outline.querySelectorAll(".here")) old.classList.remove("here");
  if (!target) return;
  const line = target.querySelector("summary") || target;
  line.classList.add("here");
  line.scrollIntoView({ block: "nearest", behavior: "instant" });
}
