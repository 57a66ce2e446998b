// Responses by count, with their verdicts; tokens are shaded by their log-probs.

function tokenSpans(group, nodes, shaded, lineEnds) {
  return nodes.map((node, position) => {
    const place = group.token[node];
    const special = group.data.special.has(place);
    const span = showText(element("span", special ? "tok special" : "tok"), group.data.tokenTexts[place], lineEnds);
    if (shaded) {
      const logprob = group.logprob[node];
      if (logprob <= 0) span.style.background = shade(logprob / 1000);
      span.title = tokenFacts(group, node, position);
    }
    return span;
  });
}

// The root spreads the small values, where most tokens lie.
const shade = (logprob) => `rgba(var(--mark), ${(0.8 * Math.sqrt(Math.min(-logprob / 5, 1))).toFixed(3)})`;

function tokenFacts(group, node, position) {
  const place = group.token[node];
  const logprob = group.logprob[node];
  const chance = group.given[node] ? "given by a result" : logprob <= 0 ? `log-prob ${(logprob / 1000).toFixed(3)}, probability ${percent(Math.exp(logprob / 1000))}` : "log-prob unknown";
  return `token ${position + 1}: “${plain(group.data.tokenTexts[place])}” (id ${group.data.tokenIds[place]}), ${chance}, in ${group.count[node]} rollouts`;
}

function scale() {
  const box = element("span", "scale");
  for (const logprob of [0, -0.5, -1, -2.5, -5]) {
    const step = element("span", "", logprob === -5 ? "−5 or less" : String(logprob).replace("-", "−"));
    step.style.background = shade(logprob);
    box.append(step);
  }
  return box;
}

function responses(group, first) {
  const ordered = kept(group).sort((a, b) => group.leafCount[b] - group.leafCount[a] || a - b);
  const box = element("div");
  const add = (from, to) => {
    box.append(...ordered.slice(from, to).map((i) => response(group, i)));
    const left = ordered.length - to;
    if (left > 0) {
      const more = element("button", "", `show ${Math.min(left, MORE)} more of ${left} responses`);
      more.addEventListener("click", () => { more.remove(); add(to, to + MORE); });
      box.append(more);
    }
  };
  add(0, first);
  return [box];
}

function response(group, i) {
  const nodes = [];
  for (let node = group.leaf[i]; node >= 0; node = group.parent[node]) nodes.unshift(node);
  const sampled = nodes.filter((node) => !group.given[node]);
  const logprobs = sampled.map((node) => group.logprob[node] / 1000);
  const sum = logprobs.reduce((a, b) => a + b, 0);
  const known = logprobs.every((v) => v <= 0);
  const extracted = group.extracted[i];
  const head = element("header", "",
    element("b", "", `×${group.leafCount[i]}`), badge(group, i),
    showText(element("span", "", "answer: "), extracted === null ? "none" : extracted, "marked"),
    element("span", "", group.unverified[i] ? "no reward" : `reward ${Number(group.reward[i].toFixed(4))}`),
    element("span", "", `score ${Number(group.score[i].toFixed(4))}`),
    element("span", "", `${sampled.length} token${sampled.length > 1 ? "s" : ""}${group.given.length ? `, ${nodes.length - sampled.length} given` : ""}`),
    element("span", "", known ? `mean log-prob ${(sum / sampled.length).toFixed(3)}, total ${sum.toFixed(2)}` : "log-probs unknown"));
  const spans = tokenSpans(group, nodes, true);
  const text = element("div", "text", ...(group.given.length ? turns(group, i, nodes, spans) : spans));
  const facts = element("div", "token-line");
  facts.setAttribute("aria-live", "polite");
  chooseTokens(group, nodes, spans, text, facts);
  const made = element("article", "response", head, text, facts);
  if (group.text[i] !== null) {
    made.append(element("div", "facts", group.given.length ? "as the verifier saw it:" : "as text:"), showText(element("div", "text"), group.text[i]));
  }
  return made;
}

// Blocks of tokens: the turns, and the results that follow those with calls.
function turns(group, i, nodes, spans) {
  const blocks = [];
  nodes.forEach((node, at) => {
    if (!at || group.given[node] !== group.given[nodes[at - 1]]) blocks.push(element("div", group.given[node] ? "part given" : "part"));
    blocks.at(-1).append(spans[at]);
  });
  blocks.forEach((block, at) => { block.dataset.kind = at % 2 ? "result" : blocks[at + 1] ? "call" : group.finished[i] ? "answer" : "cut"; });
  return blocks;
}

// A click, or the arrow keys, choose a token whose facts are shown below the response.
function chooseTokens(group, nodes, spans, text, facts) {
  let at = -1;
  const choose = (to) => {
    if (to < 0 || to >= spans.length) return;
    spans[at]?.classList.remove("at");
    at = to;
    spans[at].classList.add("at");
    facts.textContent = tokenFacts(group, nodes[at], at);
  };
  text.tabIndex = 0;
  text.setAttribute("role", "group");
  text.setAttribute("aria-label", "response; the arrow keys go from token to token");
  text.addEventListener("click", (event) => choose(spans.indexOf(event.target.closest(".tok"))));
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    choose(at + step);
  });
}
