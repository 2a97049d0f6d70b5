// The loop of the programs that print what csrc/shared computes.
#pragma once

#include <iostream>
#include <map>
#include <sstream>
#include <string>

// Takes what follows the question's name on its line.
using Answer = void (*)(std::istream&);

// The exit status: 2 for a question that nobody knows, 3 for one that lacks numbers.
inline int answer_questions(const std::map<std::string, Answer>& answers) {
  std::string line, question;
  while (std::getline(std::cin, line)) {
    std::istringstream in(line);
    in >> question;
    const auto known = answers.find(question);
    if (known == answers.end()) return 2;
    known->second(in);
    if (in.fail()) return 3;
  }
  return 0;
}
