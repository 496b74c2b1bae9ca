"""What packing does to a corpus, in numbers and pictures: reports of datasets, views of single sequences."""
