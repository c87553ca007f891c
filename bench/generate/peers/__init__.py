"""Other engines that take turns in `bench generate`: OpenVINO GenAI and llama.cpp, each in a process of its own."""
