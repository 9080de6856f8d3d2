// The words of the panel and of nodes. Node, setting and command texts are in locales/, the English names of the stages
// in stages/progress.py too.

const EN = {
  rank: "Rank",
  used: "used",
  planned: "planned",
  present: "total",
  log: "Last lines",
  start: "Start",
  startTip: "Start the workers again for the model that ran last",
  unload: "Unload weights",
  unloadTip: "Free the weights but keep the workers",
  stop: "Stop",
  stopTip: "End the workers and free everything they hold",
  noModel: "No model has been used yet",
  noServer: "The server does not answer",
  edit: "Edit this caption",
  states: { stopped: "stopped", starting: "starting", ready: "ready", busy: "working", unloaded: "weights unloaded" },
  stages: {
    load: "Loading weights",
    release: "Unloading weights",
    encode_text: "Encoding the prompt",
    encode_image: "Encoding the picture",
    sample: "Sampling",
    refine: "Refining",
    decode_video: "Decoding frames",
    decode_audio: "Decoding sound",
    write_clip: "Writing the clip",
  },
};

const ZH = {
  rank: "进程",
  used: "已用",
  planned: "计划",
  present: "总量",
  log: "最近日志",
  start: "启动",
  startTip: "为最近使用的模型重新启动工作进程",
  unload: "卸载权重",
  unloadTip: "释放权重，保留工作进程",
  stop: "停止",
  stopTip: "结束工作进程并释放其占用的全部资源",
  noModel: "尚未使用任何模型",
  noServer: "服务器没有响应",
  edit: "修改这份描述",
  states: { stopped: "已停止", starting: "正在启动", ready: "就绪", busy: "运行中", unloaded: "权重已卸载" },
  stages: {
    load: "加载权重",
    release: "卸载权重",
    encode_text: "编码提示词",
    encode_image: "编码图片",
    sample: "采样",
    refine: "精修",
    decode_video: "解码画面",
    decode_audio: "解码声音",
    write_clip: "写入视频",
  },
};

// In the page's language, as far as there is one.
export function texts(app) {
  const locale = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en";
  return String(locale).startsWith("zh") ? ZH : EN;
}
