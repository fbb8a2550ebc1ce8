"""The suite text-llama-6: six text tasks on the first blocks of SmolLM2-135M-Instruct."""
