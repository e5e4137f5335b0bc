"use strict";
// Sorting, filtering and paging of the table; the line that says what a mark of the plot is.
(() => {
  const byId = (id) => document.getElementById(id);

  function watchMarks() {
    const line = byId("point");
    if (!line) return;
    let chosen = null;
    const tell = (event) => {
      const mark = event.target.closest(".mark");
      if (!mark) return;
      if (chosen) chosen.classList.remove("chosen");
      chosen = mark;
      mark.classList.add("chosen");
      line.textContent = mark.querySelector("title").textContent;
    };
    for (const kind of ["click", "focusin", "pointerover"]) {
      byId("pareto").addEventListener(kind, tell);
    }
  }

  function makeTable() {
    const source = byId("rows-data");
    if (!source) return;
    const { page, columns } = JSON.parse(source.textContent);
    const count = columns[0].cells.length;
    const heads = Array.from(document.querySelectorAll("#rows thead th"));
    const body = document.querySelector("#rows tbody");
    const search = byId("search");
    const choosers = Array.from(document.querySelectorAll(".filters select"));
    const text = (column, row) =>
      column.cells[row] < 0 ? "-" : column.texts[column.cells[row]];
    const haystacks = Array.from({ length: count }, (_, row) =>
      columns.map((column) => text(column, row)).join("\n").toLowerCase());
    // The rows come with the fastest first; `sorted` is null until a head is used.
    const state = { sorted: null, descending: false, first: 0, rows: [] };

    function matches(row) {
      const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
      return words.every((word) => haystacks[row].includes(word)) && choosers.every((chooser) =>
        chooser.value === "" || columns[chooser.dataset.column].cells[row] === Number(chooser.value));
    }

    function compare(one, other) {
      const cells = columns[state.sorted].cells;
      const a = cells[one], b = cells[other];
      // Absent values stay last in both directions; equal ones keep the fastest first.
      if (a < 0 || b < 0) return (a < 0) - (b < 0) || one - other;
      return (state.descending ? b - a : a - b) || one - other;
    }

    function select() {
      state.rows = Array.from({ length: count }, (_, row) => row).filter(matches);
      if (state.sorted !== null) state.rows.sort(compare);
      state.first = 0;
      draw();
    }

    function draw() {
      const shown = state.rows.slice(state.first, state.first + page);
      body.replaceChildren(...shown.map((row) => {
        const line = document.createElement("tr");
        for (const column of columns) {
          const cell = document.createElement("td");
          cell.textContent = text(column, row);
          if (column.numeric) cell.className = "number";
          line.append(cell);
        }
        return line;
      }));
      const total = state.rows.length;
      byId("count").textContent = total === 0 ? "no configuration passes the filters"
        : `${state.first + 1} to ${state.first + shown.length} of ${total}`;
      byId("previous").disabled = state.first === 0;
      byId("next").disabled = state.first + page >= total;
    }

    function sortBy(index) {
      const current = heads.findIndex((head) => head.hasAttribute("aria-sort"));
      const before = current < 0 ? null : heads[current].getAttribute("aria-sort");
      state.descending = current === index && before === "ascending";
      state.sorted = index;
      if (current >= 0) heads[current].removeAttribute("aria-sort");
      heads[index].setAttribute("aria-sort", state.descending ? "descending" : "ascending");
      select();
    }

    function turn(step) {
      state.first += step * page;
      draw();
    }

    heads.forEach((head, index) =>
      head.querySelector("button").addEventListener("click", () => sortBy(index)));
    search.addEventListener("input", select);
    choosers.forEach((chooser) => chooser.addEventListener("change", select));
    byId("clear").addEventListener("click", () => {
      search.value = "";
      choosers.forEach((chooser) => { chooser.value = ""; });
      select();
    });
    byId("previous").addEventListener("click", () => turn(-1));
    byId("next").addEventListener("click", () => turn(1));
    select();
  }

  // What is folded away on the screen belongs on paper.
  window.addEventListener("beforeprint", () => {
    for (const folded of document.querySelectorAll("details")) folded.open = true;
  });
  watchMarks();
  makeTable();
})();
