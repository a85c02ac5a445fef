"""Import names of the Neuron compiler package, over the simulator in neuron_cpu.core."""
