"use strict";
// Two texts word by word.

/** Words and single CJK letters, with the white space between them. */
kvexp.words = (text) => text.match(/\s+|[\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]|[^\s\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]+/gu) ?? [];

/** [left, right]: [same, text] of each word, by a longest common subsequence; white space never differs. */
kvexp.diff = (a, b) => {
  const [left, right] = [kvexp.words(a), kvexp.words(b)];
  const solid = (words) => words.flatMap((word, i) => (/^\s/u.test(word) ? [] : [i]));
  const [rows, columns] = [solid(left), solid(right)];
  const width = columns.length + 1;
  const length = new Uint16Array((rows.length + 1) * width);
  for (let i = rows.length - 1; i >= 0; i--) {
    for (let j = columns.length - 1; j >= 0; j--) {
      length[i * width + j] = left[rows[i]] === right[columns[j]]
        ? length[(i + 1) * width + j + 1] + 1
        : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
    }
  }
  const [lost, added] = [new Set(rows), new Set(columns)];
  for (let i = 0, j = 0; i < rows.length && j < columns.length;) {
    if (left[rows[i]] === right[columns[j]]) {
      lost.delete(rows[i++]);
      added.delete(columns[j++]);
    } else if (length[(i + 1) * width + j] >= length[i * width + j + 1]) i++;
    else j++;
  }
  return [left.map((word, i) => [!lost.has(i), word]), right.map((word, i) => [!added.has(i), word])];
};
