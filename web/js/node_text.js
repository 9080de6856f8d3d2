// Shows what a node has to say below its widgets: tokens, sizes, warnings, captions. Everything works without it.
import { app } from "../../../scripts/app.js";
import { texts } from "./texts.mjs";

const TEXT = "magi2_text";
const EDIT = "magi2_edit";
const PROGRESS = "$$node-text-preview"; // the page's own line of progress

function find(node, name) {
  return node.widgets?.find((widget) => widget.name === name);
}

function notSaved(widget) {
  widget.serialize = false; // neither in the workflow nor in the prompt
  return widget;
}

function addText(node) {
  const area = document.createElement("textarea");
  area.className = "comfy-multiline-input";
  area.readOnly = true;
  const options = {
    serialize: false,
    getMinHeight: () => 90,
    getValue: () => area.value,
    setValue: (value) => {
      area.value = value;
    },
  };
  const widget = notSaved(node.addDOMWidget(TEXT, "text", area, options));
  const [width, height] = node.computeSize();
  node.setSize([Math.max(node.size[0], width), Math.max(node.size[1], height)]);
  return widget;
}

function removeProgress(node) {
  const widget = find(node, PROGRESS);
  if (!widget) return;
  widget.onRemove?.();
  node.widgets.splice(node.widgets.indexOf(widget), 1);
}

// The caption that was shown goes into the field in which it can be changed.
function offerEdit(node, caption) {
  node.magi2Caption = caption;
  if (find(node, EDIT)) return;
  const take = () => {
    const field = find(node, "edited_caption");
    field.value = node.magi2Caption;
    field.callback?.(field.value);
    node.setDirtyCanvas(true, true);
  };
  const button = notSaved(node.addWidget("button", EDIT, null, take, { serialize: false }));
  button.label = texts(app).edit;
}

app.registerExtension({
  name: "Magi2.NodeText",
  nodeCreated(node) {
    if (!node.comfyClass?.startsWith("Magi2")) return;
    const before = node.onExecuted;
    node.onExecuted = function (output) {
      before?.apply(this, arguments);
      if (output?.caption?.length) offerEdit(this, output.caption[0]);
      if (!output?.text?.length) return;
      removeProgress(this);
      (find(this, TEXT) ?? addText(this)).value = output.text.join("\n");
      this.setDirtyCanvas(true, true);
    };
  },
});
