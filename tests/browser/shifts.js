// Adds up the layout shifts of a page.
new PerformanceObserver(list => {
  for (const one of list.getEntries()) window.shifts = (window.shifts ?? 0) + one.value;
}).observe({type: "layout-shift", buffered: true});
