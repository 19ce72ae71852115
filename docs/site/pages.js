// Tables of class "sortable": a click on a heading sorts by its column, and a field above keeps rows with a text.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".sortable table")) {
    const body = table.tBodies[0];
    const text = (row, column) => row.cells[column].textContent.trim();

    const field = document.createElement("input");
    field.type = "search";
    field.placeholder = "rows with …";
    field.setAttribute("aria-label", "Show rows with this text");
    field.addEventListener("input", () => {
      const wanted = field.value.toLowerCase();
      for (const row of body.rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
    });
    table.closest(".sortable").prepend(field);

    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      heading.style.cursor = "pointer";
      heading.tabIndex = 0;
      const sort = () => {
        const falling = heading.getAttribute("aria-sort") === "ascending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
        const rows = [...body.rows].sort((one, two) => {
          const order = text(one, column).localeCompare(text(two, column), "en", { numeric: true });
          return falling ? -order : order;
        });
        body.append(...rows);
      };
      heading.addEventListener("click", sort);
      heading.addEventListener("keydown", (event) => event.key === "Enter" && sort());
    });
  }
});

// Keys such as "tensor_parallel.mesh.batch" may break at their dots where a table is narrow; cells with
// a sentence stay wide enough to be read; a picture opens in its own size.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("td code .pre")) {
    code.innerHTML = code.innerHTML.replace(/(?<=\w[./])(?=\w)/g, "<wbr>");
  }
  for (const cell of document.querySelectorAll(".table-wrapper td")) {
    cell.classList.toggle("long", cell.textContent.length > 80);
  }
  for (const picture of document.querySelectorAll(".content img")) {
    if (picture.closest("a")) continue;
    const link = document.createElement("a");
    link.href = picture.src;
    picture.replaceWith(link);
    link.append(picture);
  }
});
