// The status tab: what the workers are, hold and do. Shows server data with textContent only.

const REFRESH_MS = 5000;

function element(tag, style = "", text = "") {
  const made = document.createElement(tag);
  made.style.cssText = style;
  made.textContent = text;
  return made;
}

function gigabytes(bytes) {
  return bytes === null || bytes === undefined ? "?" : `${(bytes / 1e9).toFixed(1)} GB`;
}

function bar(share) {
  const frame = element("div", "height:6px;border-radius:3px;background:var(--border-color);overflow:hidden");
  const width = Math.max(0, Math.min(1, share)) * 100;
  const colour = share > 1 ? "var(--error-text, #d66)" : "var(--p-primary-color, #4a90d9)";
  frame.append(element("div", `height:100%;width:${width}%;background:${colour}`));
  return frame;
}

function rankBlock(rank, texts) {
  const block = element("div", "display:flex;flex-direction:column;gap:4px");
  const title = `${texts.rank} ${rank.rank}: ${rank.device}${rank.device_name ? ` (${rank.device_name})` : ""}`;
  const used = rank.used ? rank.used.reserved ?? rank.used.resident : null;
  const line = `${texts.used} ${gigabytes(used)}, ${texts.planned} ${gigabytes(rank.planned)}, ${texts.present} ${gigabytes(rank.memory)}`;
  block.append(element("div", "", title), bar((used ?? 0) / rank.memory), element("small", "opacity:.75", line));
  return block;
}

function progressBlock(progress, texts) {
  const block = element("div", "display:flex;flex-direction:column;gap:4px");
  const name = texts.stages[progress.stage] ?? progress.stage;
  const count = progress.total ? ` ${progress.done}/${progress.total}` : "";
  block.append(element("div", "", name + count), bar(progress.total ? progress.done / progress.total : 0));
  return block;
}

// Fill `root`; returns a function that takes everything away again.
export function createPanel(root, { api, post, texts }) {
  const panel = element(
    "div",
    "display:flex;flex-direction:column;gap:12px;padding:12px;height:100%;box-sizing:border-box;overflow:auto;" +
      "color:var(--fg-color);background:var(--comfy-menu-bg)",
  );
  panel.dataset.testid = "magi2-panel";
  const head = element("div", "display:flex;flex-direction:column;gap:4px");
  const buttons = element("div", "display:flex;gap:6px;flex-wrap:wrap");
  const progress = element("div");
  const ranks = element("div", "display:flex;flex-direction:column;gap:10px");
  const log = element(
    "pre",
    "margin:0;padding:8px;white-space:pre-wrap;word-break:break-word;font-size:11px;border:1px solid var(--border-color);" +
      "border-radius:4px;min-height:80px",
  );
  panel.append(head, buttons, progress, ranks, element("div", "opacity:.75", texts.log), log);
  root.replaceChildren(panel);

  const actions = { start: "/magi2/start", unload: "/magi2/unload", stop: "/magi2/stop" };
  for (const [name, path] of Object.entries(actions)) {
    const button = element(
      "button",
      "padding:4px 10px;color:inherit;background:var(--comfy-input-bg);border:1px solid var(--border-color);" +
        "border-radius:4px;cursor:pointer",
      texts[name],
    );
    button.title = texts[`${name}Tip`];
    button.dataset.testid = `magi2-${name}`;
    button.onclick = async () => {
      button.disabled = true;
      const status = await post(path);
      button.disabled = false;
      if (status.state) show(status);
    };
    buttons.append(button);
  }

  function show(status) {
    const state = texts.states[status.state] ?? status.state;
    const about = status.model ? `${status.model}, ${status.layout}, ${status.dtype}` : texts.noModel;
    head.replaceChildren(element("strong", "", `MAGI-2: ${state}`), element("small", "opacity:.75", about));
    progress.replaceChildren(...(status.progress ? [progressBlock(status.progress, texts)] : []));
    ranks.replaceChildren(...status.ranks.map((rank) => rankBlock(rank, texts)));
    log.textContent = status.log.join("\n");
  }

  async function refresh() {
    try {
      const answer = await api.fetchApi("/magi2/status");
      if (answer.ok) show(await answer.json());
    } catch {
      head.replaceChildren(element("strong", "", texts.noServer));
    }
  }

  const listener = (event) => show(event.detail);
  api.addEventListener("magi2.status", listener);
  const timer = setInterval(refresh, REFRESH_MS);
  refresh();
  return () => {
    clearInterval(timer);
    api.removeEventListener("magi2.status", listener);
    panel.remove();
  };
}
