"""From a sample's number to the arrays that training reads: order, tokens, labels and boundaries. numpy only."""
