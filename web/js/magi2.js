// The pack's part of the page: a status tab in the sidebar, three commands and two settings. Everything works without it.
import { app } from "../../../scripts/app.js";
import { api } from "../../../scripts/api.js";
import { createPanel } from "./panel.mjs";
import { texts } from "./texts.mjs";

const DEFAULTS = { give_up: "when asked", idle_minutes: 0 };
const IDS = { give_up: "Magi2.GiveUpMemory", idle_minutes: "Magi2.IdleMinutes" };

// The answer, or {} after a message to the user; never throws.
async function post(path, body = {}) {
  const headers = { "Content-Type": "application/json" };
  const request = { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await api.fetchApi(path, request).catch(() => null);
  const content = (await answer?.json().catch(() => null)) ?? {};
  if (!answer?.ok) {
    const detail = content.error ?? (answer ? `${path}: ${answer.status}` : texts(app).noServer);
    app.extensionManager?.toast?.add({ severity: "warn", summary: "MAGI-2", detail, life: 8000 });
  }
  return content;
}

// A setting is sent when the user changes it, and once at the start if it is not the default.
function send(name) {
  return (value, before) => {
    if (before === undefined && value === DEFAULTS[name]) return;
    post("/magi2/settings", { [name]: value });
  };
}

// A server that was started again has forgotten them.
function sendAll() {
  const value = (name) => app.extensionManager.setting.get(IDS[name]) ?? DEFAULTS[name];
  post("/magi2/settings", { give_up: value("give_up"), idle_minutes: value("idle_minutes") });
}

app.registerExtension({
  name: "Magi2.Native",
  settings: [
    {
      id: IDS.give_up,
      name: "Free the workers' memory for other models",
      type: "combo",
      options: ["never", "when asked", "always"],
      defaultValue: DEFAULTS.give_up,
      category: ["MAGI-2", "Workers", "GiveUpMemory"],
      tooltip:
        "never: only the MAGI-2 nodes and the MAGI-2 tab free it. when asked: ComfyUI's Unload Models does too. always: also any model that needs room.",
      onChange: send("give_up"),
    },
    {
      id: IDS.idle_minutes,
      name: "Stop idle workers after so many minutes (0: never)",
      type: "number",
      attrs: { min: 0, max: 1440, step: 1 },
      defaultValue: DEFAULTS.idle_minutes,
      category: ["MAGI-2", "Workers", "IdleMinutes"],
      tooltip: "The next run starts them again and reads the weights anew.",
      onChange: send("idle_minutes"),
    },
  ],
  commands: [
    { id: "Magi2.StartWorkers", label: "MAGI-2: start workers", function: () => post("/magi2/start") },
    { id: "Magi2.UnloadWeights", label: "MAGI-2: unload weights", function: () => post("/magi2/unload") },
    { id: "Magi2.StopWorkers", label: "MAGI-2: stop workers", function: () => post("/magi2/stop") },
  ],
  setup() {
    // the page complains about an event that nobody listens to, and the panel listens only while it is open
    api.addEventListener("magi2.status", () => {});
    api.addEventListener("reconnected", sendAll);
    let close = () => {};
    app.extensionManager.registerSidebarTab({
      id: "magi2",
      icon: "pi pi-server",
      title: "MAGI-2",
      tooltip: "MAGI-2",
      type: "custom",
      render(element) {
        close();
        close = createPanel(element, { api, post, texts: texts(app) });
      },
      destroy() {
        close();
        close = () => {};
      },
    });
  },
});
