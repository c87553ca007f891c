"""The plug-in of vLLM: with stand-ins here, with vLLM itself in host/."""
