// The browser of rollouts: the prompts of a step, the tree of one of them, its responses; or the same held-out prompts at
// two evaluations, side by side. Texts are only ever set as text.

const unpacked = new Map(); // "folder-run-step" -> its data
const FOLDERS = [["evaluations", "held-out prompts, before and after"], ["rollouts", "training prompts"]];
const view = { run: 0, folder: null, sides: [], data: null, prompt: null, shown: [], turn: 0 }; // data: the last side
const MORE = 20; // responses or branches that are added at a time
const FEW = 6; // responses at first, when two evaluations are side by side

function element(tag, className, ...content) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...content);
  return made;
}

async function unpack(folder, run, step) {
  const key = `${folder}-${run}-${step}`;
  if (!unpacked.has(key)) {
    const packed = Uint8Array.from(atob(document.getElementById(key).textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const step_ = JSON.parse(await new Response(stream).text());
    step_.special = new Set(step_.special);
    step_.groups.forEach((group, i) => { group.place = i; group.data = step_; prepare(group); });
    unpacked.set(key, step_);
  }
  return unpacked.get(key);
}

// Nodes are in depth-first order: the parent of a node is the last one before it that is one level up.
function prepare(group) {
  const last = [];
  group.parent = group.depth.map((depth, i) => { last[depth] = i; return depth ? last[depth - 1] : -1; });
  group.children = group.depth.map(() => []);
  group.roots = [];
  group.parent.forEach((parent, i) => (parent < 0 ? group.roots : group.children[parent]).push(i));
  group.ending = group.depth.map(() => []);
  group.leaf.forEach((node, response) => group.ending[node].push(response));
}

// Characters that would act on the page rather than show are escaped, as in `brorl samples`.
const ACTING = /[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

function writtenOut(character) {
  if (character === "\r") return "\\r";
  const code = character.codePointAt(0);
  const [letter, digits] = code < 0x100 ? ["x", 2] : code < 0x10000 ? ["u", 4] : ["U", 8];
  return `\\${letter}${code.toString(16).padStart(digits, "0")}`;
}

function showText(parent, text, lineEnds = "kept") {
  let done = 0;
  for (const match of text.matchAll(ACTING)) {
    const c = match[0];
    parent.append(text.slice(done, match.index));
    done = match.index + c.length;
    const mark = { "\n": "↵", "\t": "⇥" }[c];
    parent.append(element("span", "acting", mark || writtenOut(c)), mark && lineEnds === "kept" ? c : "");
  }
  parent.append(text.slice(done));
  return parent;
}

function plain(text) {
  const box = element("span");
  return showText(box, text, "marked").textContent;
}

const percent = (fraction) => `${(100 * fraction).toFixed(fraction > 0 && fraction < 0.1 ? 1 : 0)}%`;

const fractionColor = (fraction) => `color-mix(in oklab, var(--right) ${Math.round(100 * fraction)}%, var(--wrong))`;

// ---- which run, step and prompt

function options(select, pairs) {
  select.replaceChildren(...pairs.map(([value, text]) => {
    const option = element("option", "", text);
    option.value = String(value);
    return option;
  }));
}

const stepSelect = document.getElementById("browser-step");
const otherSelect = document.getElementById("browser-other");

const hasRollouts = (run) => FOLDERS.some(([folder]) => run[folder].length);

async function chooseRun(place) {
  const run = data.runs[place];
  const folders = FOLDERS.filter(([folder]) => run[folder].length);
  view.run = place;
  options(document.getElementById("browser-folder"), folders);
  document.getElementById("folder-label").hidden = folders.length === 1;
  const first = run.evaluations.length > 1 || !run.rollouts.length ? "evaluations" : "rollouts";
  await chooseFolder(folders.some(([folder]) => folder === view.folder) ? view.folder : first);
}

// Two evaluations are shown side by side, the first and the last if no others are chosen.
async function chooseFolder(folder) {
  const before = Number(stepSelect.value);
  const again = view.folder === folder;
  const entries = data.runs[view.run][folder];
  const pairs = entries.map(({ step, label }) => [step, label]);
  const sideBySide = folder === "evaluations" && entries.length > 1;
  view.folder = folder;
  document.getElementById("browser-folder").value = folder;
  document.getElementById("step-name").textContent = sideBySide ? "compare" : folder === "rollouts" ? "at" : "evaluation";
  document.getElementById("other-label").hidden = !sideBySide;
  for (const select of [stepSelect, otherSelect]) options(select, pairs);
  const kept = again && entries.some(({ step }) => step === before);
  stepSelect.value = String(kept ? before : entries.at(sideBySide ? 0 : -1).step);
  otherSelect.value = String(entries.at(-1).step);
  await chooseSteps();
}

async function chooseSteps() {
  const { run, folder } = view;
  const turn = view.turn += 1;
  const selects = document.getElementById("other-label").hidden ? [stepSelect] : [stepSelect, otherSelect];
  const chosen = selects.map((select) => ({ step: Number(select.value), label: select.selectedOptions[0].textContent }));
  let loaded;
  try {
    loaded = await Promise.all(chosen.map(({ step }) => unpack(folder, run, step)));
  } catch (error) {
    document.getElementById("browser-status").textContent =
      `this browser cannot unpack the rollouts (${error.message}); use a newer browser, or ${data.runs[run].samples}`;
    return;
  }
  if (view.turn !== turn) return; // a different one was chosen in the meantime
  const before = view.prompt !== null && view.data?.groups[view.prompt]?.id;
  view.sides = loaded.map((side, i) => ({ label: chosen[i].label, data: side }));
  view.data = loaded.at(-1);
  shortenPrompts(view.data.groups);
  const same = view.data.groups.findIndex((group) => group.id === before);
  view.prompt = same >= 0 ? same : null;
  listPrompts();
}

// Rollouts that infrastructure failures kept from being verified are neither correct nor incorrect.
const passRate = (group) => group.right / Math.max(group.verified, 1);

const KINDS = {
  all: () => true,
  right: (group, i) => Boolean(group.correct[i]),
  wrong: (group, i) => !group.correct[i] && !group.unverified[i],
  cut: (group, i) => !group.finished[i],
};
const ORDERS = {
  ascending: (a, b) => passRate(a) - passRate(b),
  descending: (a, b) => passRate(b) - passRate(a),
  mixed: (a, b) => Math.abs(passRate(a) - 0.5) - Math.abs(passRate(b) - 0.5),
  sampled: () => 0,
};

const kept = (group) => group.leaf.map((_, i) => i).filter((i) => KINDS[document.getElementById("browser-filter").value](group, i));

// A group at each side that has the prompt, with the side's label.
function atEachSide(group) {
  if (view.sides.length === 1) return [{ label: view.sides[0].label, group }];
  return view.sides.flatMap(({ label, data: side }) => {
    const found = side.groups.find((other) => other.id === group.id);
    return found ? [{ label, group: found }] : [];
  });
}

function listPrompts() {
  const order = ORDERS[document.getElementById("browser-order").value];
  view.shown = view.data.groups.filter((group) => atEachSide(group).some((side) => kept(side.group).length))
    .sort((a, b) => order(a, b) || a.place - b.place).map((group) => group.place);
  document.getElementById("browser-status").textContent =
    `${view.shown.length} of the ${view.data.groups.length} prompts on this page`;
  const list = document.getElementById("prompts");
  list.replaceChildren(...view.shown.map((place) => promptRow(view.data.groups[place])));
  choosePrompt(view.shown.includes(view.prompt) ? view.prompt : view.shown[0] ?? null);
}

// Long beginnings and ends that all prompts share (instructions, templates) are omitted from the list.
function shortenPrompts(groups) {
  const texts = groups.map((group) => group.prompt);
  const shared = (all) => {
    const [first, ...others] = all;
    let n = 0;
    while (n < first.length && others.every((text) => text[n] === first[n])) n += 1;
    return n > 24 && others.length ? n : 0;
  };
  const begin = shared(texts);
  const end = shared(texts.map((text) => [...text.slice(begin)].reverse().join("")));
  for (const group of groups) group.short = group.prompt.slice(begin, group.prompt.length - end).trim().slice(0, 160);
}

function meter(group) {
  const fill = element("b");
  fill.style.width = percent(passRate(group));
  return element("span", "meter", element("i", "", fill), `${group.right}/${group.verified}`);
}

function promptRow(group) {
  const row = element("div", "prompt", element("span", "what mono", plain(group.short || group.id)),
    ...atEachSide(group).map((side) => meter(side.group)));
  row.id = `prompt-${group.place}`;
  row.setAttribute("role", "option");
  row.title = plain(group.id);
  row.addEventListener("click", () => choosePrompt(group.place));
  return row;
}

function choosePrompt(place) {
  view.prompt = place;
  const list = document.getElementById("prompts");
  for (const row of list.children) row.setAttribute("aria-selected", String(row.id === `prompt-${place}`));
  const chosen = document.getElementById(`prompt-${place}`);
  if (chosen) {
    list.setAttribute("aria-activedescendant", chosen.id);
    if (chosen.offsetTop < list.scrollTop || chosen.offsetTop + chosen.offsetHeight > list.scrollTop + list.clientHeight) {
      list.scrollTop = chosen.offsetTop - list.clientHeight / 2;
    }
  }
  showGroup();
}

function movePrompt(event) {
  const at = view.shown.indexOf(view.prompt);
  const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: view.shown.length - 1 };
  const to = moves[event.key];
  if (to === undefined) return;
  event.preventDefault();
  if (view.shown[to] !== undefined) choosePrompt(view.shown[to]);
}

// ---- one prompt

function showGroup() {
  const box = document.getElementById("group");
  if (view.prompt === null) {
    box.replaceChildren(element("p", "empty", "No prompt of this step has such responses."));
    return;
  }
  const group = view.data.groups[view.prompt];
  const sides = atEachSide(group).map((side) => ({ ...side, box: element("div", "side") }));
  box.replaceChildren(
    element("h3", "", "Prompt"),
    showText(element("div", "text prompt-text"), group.prompt),
    element("p", "facts", plain(`${group.id} · ${group.domain}`)),
    element("div", sides.length > 1 ? "sides two" : "sides", ...sides.map((side) => side.box)));
  for (const side of sides) showSide(side);
}

function showSide({ label, group, box }) {
  const missing = group.responses - group.leaf.length;
  const lost = group.rollouts - group.verified;
  const [calls, distinct] = group.called;
  const facts = `${group.right} of ${group.verified} ${lost ? `verified rollouts correct (${lost} could not be verified)` : "rollouts correct"}, ${group.cut} truncated, ${group.responses} distinct `
    + `responses${missing ? `, the ${group.leaf.length} most frequent of them on this page` : ""}`;
  const outline = element("div", "outline");
  box.append(
    element("h3", "", `Tree of its rollouts, ${label}`),
    element("p", "facts", facts, ...(calls ? [`, ${calls} turns with calls, ${distinct} of them distinct; `, element("span", "key given", "result"), " marks what a call returned"] : [])),
    drawIcicle(group, outline, box.clientWidth), outline,
    element("h3", "", "Responses by count"),
    element("p", "facts", "log-prob of a token: ", scale()),
    ...responses(group, view.sides.length > 1 ? FEW : MORE));
  outline.append(branches(group, group.roots, group.rollouts, 0));
  unfold(outline);
}

async function prepareBrowser() {
  const first = data.runs.findIndex(hasRollouts);
  if (first < 0) return;
  document.getElementById("browser").hidden = false;
  const runSelect = document.getElementById("browser-run");
  options(runSelect, data.runs.flatMap((run, i) => (hasRollouts(run) ? [[i, run.name]] : [])));
  document.getElementById("run-label").hidden = data.runs.length === 1;
  runSelect.addEventListener("change", () => chooseRun(Number(runSelect.value)));
  document.getElementById("browser-folder").addEventListener("change", (event) => chooseFolder(event.target.value));
  for (const select of [stepSelect, otherSelect]) select.addEventListener("change", chooseSteps);
  for (const id of ["browser-order", "browser-filter"]) document.getElementById(id).addEventListener("change", listPrompts);
  document.getElementById("browser-order").value = "mixed";
  document.getElementById("prompts").addEventListener("keydown", movePrompt);
  await chooseRun(first);
}
