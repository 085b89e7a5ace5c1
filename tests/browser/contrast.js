// The lowest contrast of a visible text with what is behind it, as WCAG defines it: [ratio, text].
(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgba = colour => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = colour => rgba(colour).slice(0, 3).map(part => part / 255)
    .map(part => part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4)
    .reduce((sum, part, at) => sum + part * [.2126, .7152, .0722][at], 0);
  const behind = element => {
    for (; element; element = element.parentElement) {
      const back = getComputedStyle(element).backgroundColor;
      if (rgba(back)[3] === 255) return back;
    }
    return "white";
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement, text = walker.currentNode.textContent.trim();
    if (!text || !element.checkVisibility() || ["SCRIPT", "STYLE", "NOSCRIPT"].includes(element.tagName)) continue;
    const style = getComputedStyle(element), front = element instanceof SVGElement ? style.fill : style.color;
    const [low, high] = [light(front), light(behind(element))].sort((one, other) => one - other);
    found.push([(high + .05) / (low + .05), text]);
  }
  return found.sort((one, other) => one[0] - other[0])[0];
})()
